-- Advances the purge by one slice: removes the berths of dead workers, and frees their numbers at the end.
-- A slice is atomic and takes Redis about a millisecond. The index changes between slices.
-- ARGV: most buckets, most entries, number of buckets. Returns {active, next bucket, changed entries, freed berths}.
-- include prelude

local slice_buckets, slice_entries, num_buckets = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local condemned = prefix .. 'condemned'

-- Put the dead berths into `condemned`. They have no epoch, so nothing can be written under their numbers during the
-- purge.
local function condemn()
  local now, service = now_ms(), redis.call('HMGET', state, 'beat', 'beat_lease', 'since')
  local last_beat, beat_lease = tonumber(service[1]) or 0, tonumber(service[2]) or 0
  local since = tonumber(service[3])
  if not since or since > now then
    since = now
    redis.call('HSET', state, 'since', now)
  end
  local serving = now - last_beat <= beat_lease
  -- No worker of ours writes a lease this far ahead. Live until then, its berth would never be purged.
  for _, berth in ipairs(redis.call('ZRANGEBYSCORE', leases, '(' .. now + 2 * beat_lease, '+inf')) do
    local lease_ms = tonumber(redis.pcall('HGET', berth_key(berth), 'lease')) or beat_lease
    if redis.call('ZSCORE', leases, berth) - now > 2 * lease_ms then
      redis.call('ZADD', leases, now + lease_ms, berth)
    end
  end
  local lapsed = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'WITHSCORES')
  for index = 1, #lapsed, 2 do
    local berth, deadline = lapsed[index], tonumber(lapsed[index + 1])
    local known = redis.pcall('HMGET', berth_key(berth), 'epoch', 'lease')
    local lease_ms = tonumber(known[2]) or beat_lease
    if not known[1] or (serving and now - math.max(deadline, since) >= 2 * lease_ms) then
      retire(berth)
      redis.call('SADD', condemned, berth)
    end
  end
end

local function release()
  local freed = {}
  for _, berth in ipairs(redis.call('SMEMBERS', condemned)) do
    local identity = redis.call('HGET', prefix .. 'names', berth)
    if identity and redis.call('HGET', prefix .. 'identities', identity) == berth then
      redis.call('HDEL', prefix .. 'identities', identity)
    end
    redis.call('HDEL', prefix .. 'names', berth)
    redis.call('DEL', berth_key(berth))
    redis.call('ZREM', leases, berth)
    -- A member that is no number was never a berth.
    if string.match(berth, '^%d+$') then
      redis.call('SADD', prefix .. 'free', berth)
      freed[#freed + 1] = berth
    end
  end
  redis.call('DEL', condemned)
  redis.call('HDEL', state, 'cursor')
  return freed
end

-- A purge must go on where memory is full: after a command that takes no memory, Redis refuses no write of a script.
redis.call('HDEL', state, '')
local cursor = redis.call('HGET', state, 'cursor')
if cursor then
  -- A cursor that our scripts did not write would never reach the end: begin again.
  cursor = tonumber(cursor) or 0
  if cursor < 0 or cursor > num_buckets or cursor % 1 ~= 0 then cursor = 0 end
else
  condemn()
  if redis.call('EXISTS', condemned) == 0 then return {0, 0, 0, {}} end
  cursor = 0
end

local keep = {}
for _, berth in ipairs(redis.call('ZRANGE', leases, 0, -1)) do keep[tonumber(berth) or 0] = true end
for _, berth in ipairs(redis.call('SMEMBERS', condemned)) do keep[tonumber(berth) or 0] = nil end

-- An odd or unsorted value was not written by our scripts. Drop it: its owners will find that it is missing.
local function survivors(field, value)
  local kept, last = {}, 0
  if #field ~= 7 or #value % 2 == 1 or #value > max_value_bytes then return '' end
  for position = 1, #value / 2 do
    local berth = berth_at(value, position)
    if berth <= last then return '' end
    last = berth
    if keep[berth] then kept[#kept + 1] = string.sub(value, position * 2 - 1, position * 2) end
  end
  return table.concat(kept)
end

local seen, changed, stop = 0, 0, math.min(cursor + slice_buckets, num_buckets)
while cursor < stop and seen < slice_entries do
  local bucket = bucket_key(cursor)
  local entries = redis.pcall('HGETALL', bucket)
  if entries.err then redis.call('DEL', bucket) changed = changed + 1 end
  for index = 1, #entries, 2 do
    local field, value = entries[index], entries[index + 1]
    local kept = survivors(field, value)
    if kept == '' then
      redis.call('HDEL', bucket, field)
    elseif kept ~= value then
      redis.call('HSET', bucket, field, kept)
    end
    if kept ~= value then changed = changed + 1 end
    seen = seen + 1
  end
  cursor = cursor + 1
end
if cursor == num_buckets then return {0, 0, changed, release()} end
redis.call('HSET', state, 'cursor', cursor)
return {1, cursor, changed, {}}
