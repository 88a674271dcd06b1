-- Helpers of every script. KEYS[1] is the prefix of all keys of the cluster.
--
-- Stored data may be damaged or of a foreign writer. Look-ups skip such data, and writers remove it. A registration
-- recreates the keys that whole scripts need (`leases`, `state`).

local prefix = KEYS[1]
local leases, state = prefix .. 'leases', prefix .. 'state'

-- Only finite numbers count. `nan` raises an error as a table index, and no comparison with it ends a loop.
local any_number = tonumber
local function tonumber(text)
  local number = any_number(text)
  if number and number == number and math.abs(number) < math.huge then return number end
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function berth_key(berth) return prefix .. 'berth:' .. berth end

-- Three hexadecimal digits by hand: string.format for each name takes an eighth of a batch's time.
local digits, bucket_prefix = {}, prefix .. 'b:'
for value = 0, 15 do digits[value] = string.sub('0123456789abcdef', value + 1, value + 1) end
local function bucket_key(bucket)
  local low, rest = bucket % 16, math.floor(bucket / 16)
  return bucket_prefix .. digits[math.floor(rest / 16)] .. digits[rest % 16] .. digits[low]
end

local function locate(names, index)
  local first = index * 8 - 7
  local high, low = string.byte(names, first, first + 1)
  return bucket_key(high * 16 + math.floor(low / 16)), string.sub(names, first + 1, first + 7)
end

local function berth_at(value, index)
  local low, high = string.byte(value, index * 2 - 1, index * 2)
  return low + high * 256
end

local max_value_bytes = 2 * 65535

-- Return the position of a berth among the holders of a name, or where it would stand, and whether it is there.
local function search(value, number)
  local low, high = 1, math.floor(#value / 2)
  while low <= high do
    local middle = math.floor((low + high) / 2)
    local found = berth_at(value, middle)
    if found == number then return middle, true end
    if found < number then low = middle + 1 else high = middle - 1 end
  end
  return low, false
end

-- Return a worker's berths: the one for its GPU, and the one for anywhere if it is not 0.
local function pair(berth, anywhere)
  if tonumber(anywhere) == 0 then return {berth} end
  return {berth, anywhere}
end

-- Return whether all these berths have this epoch. A berth without a lease entry is refused too, because the purge
-- removes every berth that is not in `leases`.
local function owns(berths, epoch)
  for _, berth in ipairs(berths) do
    if redis.pcall('HGET', berth_key(berth), 'epoch') ~= epoch then return false end
    if not redis.call('ZSCORE', leases, berth) then return false end
  end
  return true
end

-- Note a heartbeat, which any worker's registration or renewal is. It proves that Redis served. A silence longer than a
-- lease was an outage, or the clock was set forward. A clock that was set back would keep dead workers alive until it
-- has caught up.
local function beat(now, lease_ms)
  local last = tonumber(redis.call('HGET', state, 'beat')) or 0
  if math.abs(now - last) > lease_ms then redis.call('HSET', state, 'since', now) end
  if last - now > lease_ms then
    for _, berth in ipairs(redis.call('ZRANGEBYSCORE', leases, '(' .. now + lease_ms, '+inf')) do
      redis.call('ZADD', leases, now + lease_ms, berth)
    end
  end
  redis.call('HSET', state, 'beat', now, 'beat_lease', lease_ms)
end

-- Write a field whose value has the same length as before, even if memory is full. Return whether it is full. Then Redis
-- refuses a script's first write, unless the command never takes memory. It refuses no later write of the script.
local function write_though_full(key, field, value)
  local reply = redis.pcall('HSET', key, field, value)
  local refusal = type(reply) == 'table' and reply.err
  if not refusal then return false end
  if not string.find(refusal, 'maxmemory', 1, true) then return false, redis.call('HSET', key, field, value) end
  redis.call('HDEL', key, '')
  redis.call('HSET', key, field, value)
  return true
end

local function retire(berth)
  redis.pcall('HDEL', berth_key(berth), 'epoch')
  redis.call('ZADD', leases, 0, berth)
end
