-- Claims the cluster's name for one `up`. A stored claim that ends later than a fresh one would does not count.
-- ARGV: holder, lease (ms). Returns {1}, or {0} while another holder's claim runs.
-- include prelude

local claim, now, lease_ms = prefix .. 'claim', now_ms(), tonumber(ARGV[2])
local held = redis.pcall('HMGET', claim, 'holder', 'until')
if held.err then
  redis.call('DEL', claim)
elseif held[1] and held[1] ~= ARGV[1] then
  local left_ms = (tonumber(held[2] or '') or 0) - now
  if left_ms > 0 and left_ms <= lease_ms then return {0} end
end
redis.call('HSET', claim, 'holder', ARGV[1], 'until', now + lease_ms)
return {1}
