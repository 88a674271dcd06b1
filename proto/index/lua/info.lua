-- Counts a slice of the buckets, and measures a sample of them.
-- ARGV: first bucket, end bucket, one in how many is measured.
-- Returns {names, sampled names, sampled bytes, live berths, dead berths}.
-- include prelude

local first, stop, sample_every = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])

-- Count a value that our scripts did not write as 0. A managed Redis may refuse MEMORY.
local function number_of(...)
  local reply = redis.pcall(...)
  return type(reply) == 'number' and reply or 0
end

local names, filled, sampled_names, sampled_bytes = 0, 0, 0, 0
for number = first, stop - 1 do
  local bucket = bucket_key(number)
  local size = number_of('HLEN', bucket)
  if size > 0 then
    if filled % sample_every == 0 then
      local bytes = number_of('MEMORY', 'USAGE', bucket)
      if bytes > 0 then sampled_names, sampled_bytes = sampled_names + size, sampled_bytes + bytes end
    end
    names, filled = names + size, filled + 1
  end
end
local live = number_of('ZCOUNT', leases, '(' .. now_ms(), '+inf')
return {names, sampled_names, sampled_bytes, live, number_of('ZCARD', leases) - live}
