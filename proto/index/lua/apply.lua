-- Applies one batch of a worker: removals, then additions.
-- ARGV: berth, second berth or 0, epoch, sequence, then packed names: removed, removed anywhere, added anywhere, added.
-- Returns OK, UNKNOWN, DUPLICATE, GAP or FULL: memory is full, and only the removals were applied.
-- include prelude

local berth, anywhere, epoch, sequence = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local removed, anywhere_removed, anywhere_added, added = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
if not owns(pair(berth, anywhere), epoch) then return 'UNKNOWN' end
local last = tonumber(redis.call('HGET', berth_key(berth), 'sequence')) or -1
if sequence <= last then return 'DUPLICATE' end
if sequence > last + 1 then return 'GAP' end

-- Remove a value that none of our scripts wrote: it would stop this script half way, every time.
local function read(bucket, field)
  local value = redis.pcall('HGET', bucket, field)
  if type(value) == 'table' then redis.call('DEL', bucket) return '' end
  if not value or #value % 2 == 1 or #value > max_value_bytes then return '' end
  return value
end

local function strike(names, number)
  for index = 1, #names / 8 do
    local bucket, field = locate(names, index)
    local value = read(bucket, field)
    local position, present = search(value, number)
    if present and #value == 2 then
      redis.call('HDEL', bucket, field)
    elseif present then
      redis.call('HSET', bucket, field,
        string.sub(value, 1, position * 2 - 2) .. string.sub(value, position * 2 + 1))
    end
  end
end

local function add(names, number)
  local packed, is_new = string.char(number % 256, math.floor(number / 256)), false
  for index = 1, #names / 8 do
    local bucket, field = locate(names, index)
    -- If a new name had no holder, the next one of the chain usually has none either: one call instead of two.
    is_new = is_new and redis.pcall('HSETNX', bucket, field, packed) == 1
    if not is_new then
      local value = read(bucket, field)
      local position, present = search(value, number)
      is_new = value == ''
      if not present then
        redis.call('HSET', bucket, field,
          string.sub(value, 1, position * 2 - 2) .. packed .. string.sub(value, position * 2 - 1))
      end
    end
  end
end

local is_full = write_though_full(berth_key(berth), 'sequence', last)
strike(removed, berth)
if anywhere ~= 0 then strike(anywhere_removed, anywhere) end
if is_full and #added + #anywhere_added > #removed + #anywhere_removed then return 'FULL' end
if anywhere ~= 0 then add(anywhere_added, anywhere) end
add(added, berth)
redis.call('HSET', berth_key(berth), 'sequence', sequence)
return 'OK'
