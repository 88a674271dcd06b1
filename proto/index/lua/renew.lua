-- Extends the lease of a worker's berths, and checks a sample of what was published.
-- ARGV: berth, epoch, lease (ms), last applied sequence, second berth or 0. Then, for a check: identity, suffix,
-- address, and packed names: held, gone, held anywhere, gone anywhere. Returns OK, UNKNOWN, DAMAGED or FULL.
-- include prelude

local berths, epoch, lease_ms, applied = pair(ARGV[1], ARGV[5]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if not owns(berths, epoch) then return 'UNKNOWN' end
if (tonumber(redis.call('HGET', berth_key(berths[1]), 'sequence')) or -1) < applied then return 'UNKNOWN' end
local now = now_ms()
local is_full = write_though_full(berth_key(berths[1]), 'lease', lease_ms)
for _, berth in ipairs(berths) do
  redis.call('HSET', berth_key(berth), 'lease', lease_ms)
  redis.call('ZADD', leases, now + lease_ms, berth)
end
beat(now, lease_ms)

local identity, suffix, address = ARGV[6], ARGV[7], ARGV[8]
local well = is_full and 'FULL' or 'OK'
if not identity then return well end

local function is_entered(berth, owner)
  return redis.pcall('HGET', prefix .. 'names', berth) == owner
    and redis.pcall('HGET', prefix .. 'identities', owner) == berth
end

local function confirms(names, berth, wanted)
  for index = 1, #names / 8 do
    local value = redis.pcall('HGET', locate(names, index))
    local _, found = search(type(value) == 'string' and value or '', tonumber(berth))
    if found ~= wanted then return false end
  end
  return true
end

local is_whole = redis.pcall('HGET', berth_key(berths[1]), 'address') == address
  and is_entered(berths[1], identity) and confirms(ARGV[9], berths[1], true) and confirms(ARGV[10], berths[1], false)
if is_whole and berths[2] then
  is_whole = is_entered(berths[2], identity .. suffix)
    and confirms(ARGV[11], berths[2], true) and confirms(ARGV[12], berths[2], false)
end
return is_whole and well or 'DAMAGED'
