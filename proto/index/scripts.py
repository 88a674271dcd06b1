"""The Lua that works on the prefix index inside Redis, one script for each operation of PrefixIndex.

Owns atomicity and every rule about berths and leases. Does not own the layout (schema.py) nor the scripts that
go through all buckets, in slices (walks.py).
Each script takes the key prefix as its only key. What it reads may be garbage or of another make: look-ups
skip it, writers remove it, and what a whole script stands on (`leases`, `state`) a registration makes anew.
"""

PRELUDE = """
local prefix = KEYS[1]
local leases, state = prefix .. 'leases', prefix .. 'state'

-- What is no number to count with is none: `nan` raises where it indexes a table, and no comparison ends a loop of it.
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

-- Three hexadecimal digits by hand: string.format for each name is an eighth of a batch's time.
local function digit(value) return string.sub('0123456789abcdef', value + 1, value + 1) end

local bucket_prefix = prefix .. 'b:'
local function bucket_key(bucket)
  local low, middle = bucket % 16, math.floor(bucket / 16) % 16
  return bucket_prefix .. digit(math.floor(bucket / 256)) .. digit(middle) .. digit(low)
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

-- Where a berth stands, or would stand, among those that hold a name; and whether it does.
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

-- What a worker owns: the berth for its GPU and, where it is not 0, the one for anywhere.
local function pair(berth, anywhere)
  if tonumber(anywhere) == 0 then return {berth} end
  return {berth, anywhere}
end

-- A berth without a lease entry is refused too: the purge strikes out whoever is not in `leases`.
local function owns(berths, epoch)
  for _, berth in ipairs(berths) do
    if redis.pcall('HGET', berth_key(berth), 'epoch') ~= epoch then return false end
    if not redis.call('ZSCORE', leases, berth) then return false end
  end
  return true
end

-- Any worker's sign of life proves that Redis served. A silence longer than a lease was an outage, or its clock was set
-- forward. Set back, the clock would keep the dead alive until it is where it was.
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

local function retire(berth)
  redis.pcall('HDEL', berth_key(berth), 'epoch')
  redis.call('ZADD', leases, 0, berth)
end
"""

REGISTER = (
    PRELUDE
    + """
local epoch, lease_ms, max_berths = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local worker_id, incarnation, has_host_cache, suffix = ARGV[4], ARGV[5], ARGV[9] == '1', ARGV[10]
local now, identity = now_ms(), worker_id .. '\\0' .. incarnation

-- A key of another type would stop every script from now on. Where there was one the next purge walks over everything.
local is_damaged = false
local function repair(key, kind)
  local found = redis.call('TYPE', key).ok
  if found == kind or found == 'none' then return end
  redis.call('DEL', key)
  is_damaged = true
end

local function retire_earlier(whose)
  local earlier = tonumber(redis.call('HGET', prefix .. 'identities', whose))
  if earlier then retire(earlier) end
end

-- Whatever is left of an earlier use of the number, however it came there, would be taken for the new one's.
local function is_unused(number)
  if number < 1 or number > max_berths or number % 1 ~= 0 then return false end
  repair(berth_key(number), 'hash')
  return redis.call('EXISTS', berth_key(number)) == 0 and not redis.call('ZSCORE', leases, number)
end

local function take()
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

local function stand(berth, whose, ...)
  redis.call('HSET', berth_key(berth), 'epoch', epoch, 'lease', lease_ms, ...)
  redis.call('HSET', prefix .. 'identities', whose, berth)
  redis.call('HSET', prefix .. 'names', berth, whose)
  redis.call('ZADD', leases, now + lease_ms, berth)
end

for _, key in ipairs({'state', 'identities', 'names'}) do repair(prefix .. key, 'hash') end
for _, key in ipairs({'free', 'condemned'}) do repair(prefix .. key, 'set') end
repair(leases, 'zset')
retire_earlier(identity)
retire_earlier(identity .. suffix)
local berth = take()
if not berth then return {0, 0} end
stand(berth, identity, 'sequence', 0, 'worker_id', worker_id, 'incarnation', incarnation,
  'address', ARGV[6], 'fingerprint', ARGV[7], 'block_size', ARGV[8], 'proof', ARGV[11])
local anywhere = has_host_cache and take() or 0
if anywhere ~= 0 then stand(anywhere, identity .. suffix) end
if is_damaged then redis.call('HSET', state, 'cursor', 0) end
beat(now, lease_ms)
return {berth, anywhere}
"""
)

RENEW = (
    PRELUDE
    + """
local berths, epoch, lease_ms, applied = pair(ARGV[1], ARGV[5]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if not owns(berths, epoch) then return 'UNKNOWN' end
if (tonumber(redis.call('HGET', berth_key(berths[1]), 'sequence')) or -1) < applied then return 'UNKNOWN' end
local now = now_ms()
for _, berth in ipairs(berths) do
  redis.call('HSET', berth_key(berth), 'lease', lease_ms)
  redis.call('ZADD', leases, now + lease_ms, berth)
end
beat(now, lease_ms)

local identity, suffix, address = ARGV[6], ARGV[7], ARGV[8]
if not identity then return 'OK' end

local function stands(berth, whose)
  return redis.pcall('HGET', prefix .. 'names', berth) == whose
    and redis.pcall('HGET', prefix .. 'identities', whose) == berth
end

local function says(names, berth, wanted)
  for index = 1, #names / 8 do
    local value = redis.pcall('HGET', locate(names, index))
    local _, found = search(type(value) == 'string' and value or '', tonumber(berth))
    if found ~= wanted then return false end
  end
  return true
end

local is_whole = redis.pcall('HGET', berth_key(berths[1]), 'address') == address
  and stands(berths[1], identity) and says(ARGV[9], berths[1], true) and says(ARGV[10], berths[1], false)
if is_whole and berths[2] then
  is_whole = stands(berths[2], identity .. suffix)
    and says(ARGV[11], berths[2], true) and says(ARGV[12], berths[2], false)
end
return is_whole and 'OK' or 'DAMAGED'
"""
)

RETIRE = (
    PRELUDE
    + """
local berths = pair(ARGV[1], ARGV[3])
if owns(berths, ARGV[2]) then
  for _, berth in ipairs(berths) do retire(berth) end
end
return 'OK'
"""
)

# A claim that runs for longer than any of ours does is no claim.
CLAIM = (
    PRELUDE
    + """
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
"""
)

UNCLAIM = (
    PRELUDE
    + """
local claim = prefix .. 'claim'
if redis.pcall('HGET', claim, 'holder') == ARGV[1] then redis.call('DEL', claim) end
return 'OK'
"""
)

APPLY = (
    PRELUDE
    + """
local berth, anywhere, epoch, sequence = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local removed, anywhere_removed, anywhere_added, added = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
if not owns(pair(berth, anywhere), epoch) then return 'UNKNOWN' end
local last = tonumber(redis.call('HGET', berth_key(berth), 'sequence')) or -1
if sequence <= last then return 'DUPLICATE' end
if sequence > last + 1 then return 'GAP' end

-- What is not of our making would stop this script half way, for good: it goes.
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
    -- Below a name that nobody held nobody holds the next one either, as a rule: one call instead of two.
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

strike(removed, berth)
if anywhere ~= 0 then
  strike(anywhere_removed, anywhere)
  add(anywhere_added, anywhere)
end
add(added, berth)
redis.call('HSET', berth_key(berth), 'sequence', sequence)
return 'OK'
"""
)

_LIVE = """
local live = {}
for _, member in ipairs(redis.call('ZRANGEBYSCORE', leases, '(' .. now_ms(), '+inf')) do
  local berth = tonumber(member)
  if berth then live[berth] = true end
end
"""

LOOKUP = (
    PRELUDE
    + _LIVE
    + """
local names, max_compact = ARGV[1], tonumber(ARGV[2])
local max_holders, max_identity_bytes = tonumber(ARGV[3]), tonumber(ARGV[4])
local total, nobody, parsed, depths = #names / 8, {}, {}, {}

local function holders(index)
  local value = redis.pcall('HGET', locate(names, index))
  if type(value) ~= 'string' or #value > max_value_bytes then return nobody end
  if parsed[value] then return parsed[value] end
  local found = {}
  for position = 1, math.floor(#value / 2) do
    local berth = berth_at(value, position)
    if live[berth] then found[#found + 1] = berth end
  end
  parsed[value] = found
  return found
end

-- `at_low` hold block `low`, `at_high` hold block `high`: who is in the first alone ends between the two.
local function narrow(low, high, at_low, at_high)
  if #at_low == #at_high then return end
  if high - low > 1 then
    local middle = math.floor((low + high) / 2)
    local at_middle = holders(middle)
    narrow(low, middle, at_low, at_middle)
    narrow(middle, high, at_middle, at_high)
    return
  end
  local goes_on = {}
  for _, berth in ipairs(at_high) do goes_on[berth] = true end
  for _, berth in ipairs(at_low) do
    if not goes_on[berth] then depths[berth] = low end
  end
end

local low, at_low = 1, holders(1)
while low < total and #at_low > 0 do
  local high = math.min(low * 2, total)
  local at_high = holders(high)
  narrow(low, high, at_low, at_high)
  low, at_low = high, at_high
end
for _, berth in ipairs(at_low) do depths[berth] = low end

-- A compact hash walks to each field that is asked for: many of them cost more than all.
local function identities(berths)
  local names, found = prefix .. 'names', {}
  local size = redis.pcall('HLEN', names)
  if #berths >= 48 and type(size) == 'number' and size <= max_compact then
    local everyone = redis.pcall('HGETALL', names)
    for index = 1, #everyone, 2 do found[tonumber(everyone[index]) or 0] = everyone[index + 1] end
    return found
  end
  for first = 1, #berths, 512 do
    local last = math.min(first + 511, #berths)
    local some = redis.pcall('HMGET', names, unpack(berths, first, last))
    for index = first, last do found[berths[index]] = some[index - first + 1] end
  end
  return found
end

-- Whoever may write here may have written far more, and longer, than any cluster has.
local berths, reply = {}, {}
for berth in pairs(depths) do
  if #berths == max_holders then break end
  berths[#berths + 1] = berth
end
local found = identities(berths)
for _, berth in ipairs(berths) do
  local identity = found[berth] or ''
  reply[#reply + 1] = #identity <= max_identity_bytes and identity or ''
  reply[#reply + 1] = depths[berth]
end
return reply
"""
)

DIRECTORY = (
    PRELUDE
    + _LIVE
    + """
local after, max_berths, max_records = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local max_field_bytes, bytes_left, reply = tonumber(ARGV[4]), tonumber(ARGV[5]), {}

local berths = {}
for berth in pairs(live) do
  if berth > after and berth <= max_berths and berth % 1 == 0 then berths[#berths + 1] = berth end
end
table.sort(berths)

-- Nothing for what is no record of ours. The proof may be missing.
local function size_of(record)
  local size = 0
  for index = 1, 6 do
    local field = record[index] or (index == 6 and '')
    if not field or #field > max_field_bytes then return nil end
    size = size + #field
  end
  return size
end

for position, berth in ipairs(berths) do
  local record = redis.pcall('HMGET', berth_key(berth),
    'worker_id', 'incarnation', 'address', 'fingerprint', 'block_size', 'proof')
  local size = not record.err and size_of(record)
  if size then
    reply[#reply + 1], bytes_left = record, bytes_left - size
    if (#reply == max_records or bytes_left <= 0) and position < #berths then return {berth, reply} end
  end
end
return {0, reply}
"""
)
