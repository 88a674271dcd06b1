-- Gives a worker a fresh berth, and a second one for a host cache. Retires earlier berths of the same incarnation.
-- ARGV: epoch, lease (ms), highest berth, worker id, incarnation, address, fingerprint, block size, has a host cache
-- (1 or 0), suffix of the second identity, proof. Returns {berth, second berth}; 0 is none.
-- include prelude

local epoch, lease_ms, max_berths = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local worker_id, incarnation, has_host_cache, suffix = ARGV[4], ARGV[5], ARGV[9] == '1', ARGV[10]
local now, identity = now_ms(), worker_id .. '\0' .. incarnation

-- Delete a key of another type, which would fail every later script. After such damage the next purge covers the whole
-- index.
local is_damaged = false
local function repair(key, kind)
  local found = redis.call('TYPE', key).ok
  if found == kind or found == 'none' then return end
  redis.call('DEL', key)
  is_damaged = true
end

local function retire_earlier(owner)
  local earlier = tonumber(redis.call('HGET', prefix .. 'identities', owner))
  if earlier then retire(earlier) end
end

-- Return whether no berth has this number. Entries left from an earlier use would be taken for those of the new worker.
local function is_unused(number)
  if number < 1 or number > max_berths or number % 1 ~= 0 then return false end
  repair(berth_key(number), 'hash')
  return redis.call('EXISTS', berth_key(number)) == 0 and not redis.call('ZSCORE', leases, number)
end

local function take_berth()
  local number = tonumber(redis.call('SPOP', prefix .. 'free'))
  while number do
    if is_unused(number) then return number end
    number = tonumber(redis.call('SPOP', prefix .. 'free'))
  end
  number = tonumber(redis.call('HGET', state, 'next'))
  if not number or number < 0 or number > max_berths or number % 1 ~= 0 then number = 0 end
  repeat
    number = number + 1
    if number > max_berths then return nil end
  until is_unused(number)
  redis.call('HSET', state, 'next', number)
  return number
end

local function enter(berth, owner, ...)
  redis.call('HSET', berth_key(berth), 'epoch', epoch, 'lease', lease_ms, ...)
  redis.call('HSET', prefix .. 'identities', owner, berth)
  redis.call('HSET', prefix .. 'names', berth, owner)
  redis.call('ZADD', leases, now + lease_ms, berth)
end

for _, key in ipairs({'state', 'identities', 'names'}) do repair(prefix .. key, 'hash') end
for _, key in ipairs({'free', 'condemned'}) do repair(prefix .. key, 'set') end
repair(leases, 'zset')
retire_earlier(identity)
retire_earlier(identity .. suffix)
local berth = take_berth()
if not berth then return {0, 0} end
enter(berth, identity, 'sequence', 0, 'worker_id', worker_id, 'incarnation', incarnation,
  'address', ARGV[6], 'fingerprint', ARGV[7], 'block_size', ARGV[8], 'proof', ARGV[11])
local anywhere = has_host_cache and take_berth() or 0
if anywhere ~= 0 then enter(anywhere, identity .. suffix) end
-- Readers keep `names` until this changes. Numbers that a purge frees stand in no value, so it need not change then.
redis.call('HSET', state, 'roster', epoch)
if is_damaged then redis.call('HSET', state, 'cursor', 0) end
beat(now, lease_ms)
return {berth, anywhere}
