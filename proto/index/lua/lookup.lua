-- Finds how many leading blocks of a chain each live berth holds. It bisects: see schema.py.
-- ARGV: packed names, roster that the caller knows, most berths, most bytes of an identity, most blocks to bisect,
-- most bytes of the berths that those hold, whether there must be workers (1 or 0).
-- Returns blocks, lengths of their values, values, dead berths, roster; and unless the caller knows this roster:
-- berths, lengths of their identities, identities.
-- include prelude

local names, known_roster, max_berths = ARGV[1], ARGV[2], tonumber(ARGV[3])
local max_identity_bytes, reads_left, bytes_left = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local total, values, blocks, counts = #names / 8, {}, {}, {}

if ARGV[7] == '1' then
  local served = redis.pcall('HMGET', state, 'beat', 'beat_lease')
  if now_ms() - (tonumber(served[1]) or 0) > (tonumber(served[2]) or 0) then
    return redis.error_reply('NOLEASE no worker has a running lease')
  end
end

-- Few berths are dead and not purged yet. So the dead are listed, not the live, and what all hold costs no more.
local dead, is_dead = {}, {}
for _, member in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now_ms(), 'LIMIT', 0, max_berths)) do
  local berth = tonumber(member)
  if berth and berth >= 1 and berth <= 65535 and berth % 1 == 0 then
    dead[#dead + 1] = berth
    is_dead[berth] = true
  end
end

local function read(block)
  local value = redis.pcall('HGET', locate(names, block))
  if type(value) ~= 'string' or #value > max_value_bytes then value = '' end
  values[block] = value
  blocks[#blocks + 1] = block
  return value
end

-- Return the number of live berths. Values are counted once, because neighbours usually have the same.
local function count(value)
  local found = counts[value]
  if found then return found end
  local size = math.floor(#value / 2)
  found = size
  if #dead * 16 < size then
    for _, berth in ipairs(dead) do
      local _, present = search(value, berth)
      if present then found = found - 1 end
    end
  elseif #dead > 0 then
    for position = 1, size do
      if is_dead[berth_at(value, position)] then found = found - 1 end
    end
  end
  counts[value] = found
  return found
end

-- Gaps in which berths end: block before, block after, and so on. The live sets are nested: equal size, equal set.
local gaps = {}
local function note(into, low, high)
  if high - low > 1 and count(values[low]) ~= count(values[high]) then
    into[#into + 1], into[#into + 2] = low, high
  end
end

local low = 1
read(1)
while low < total and count(values[low]) > 0 do
  local high = math.min(low * 2, total)
  read(high)
  note(gaps, low, high)
  low = high
end

-- Halve the widest gaps first. If there are too many, depths inside the narrow ones are rounded down.
local width = total
while #gaps > 0 and reads_left > 0 and bytes_left > 0 do
  local left = {}
  width = math.floor(width / 2)
  for index = 1, #gaps, 2 do
    local from, to = gaps[index], gaps[index + 1]
    if to - from <= width or reads_left <= 0 or bytes_left <= 0 then
      left[#left + 1], left[#left + 2] = from, to
    else
      local middle = math.floor((from + to) / 2)
      local value = read(middle)
      reads_left = reads_left - 1
      if value ~= values[from] and value ~= values[to] then bytes_left = bytes_left - #value end
      note(left, from, middle)
      note(left, middle, to)
    end
  end
  gaps = left
end

-- Of neighbours that the same berths hold, only the last one counts.
table.sort(blocks)
local ends, lengths, held = {}, {}, {}
for index, block in ipairs(blocks) do
  local value = values[block]
  if value ~= '' and value ~= values[blocks[index + 1]] then
    if #value > max_berths * 2 then value = string.sub(value, 1, max_berths * 2) end
    ends[#ends + 1], lengths[#lengths + 1], held[#held + 1] = block, #value, value
  end
end

local function joined(list) return table.concat(list, ',') end

local roster = redis.pcall('HGET', state, 'roster')
if type(roster) ~= 'string' or #roster > 32 then roster = '' end
local reply = {joined(ends), joined(lengths), table.concat(held), joined(dead), roster}
if #ends == 0 or (roster ~= '' and roster == known_roster) then return reply end

-- A foreign writer may have stored more and longer entries than any cluster has. Then read only those of this reply.
local owners, sizes, identities = {}, {}, {}
local function own(berth, identity)
  berth = tonumber(berth)
  if berth and identity and #identity <= max_identity_bytes then
    owners[#owners + 1], sizes[#sizes + 1], identities[#identities + 1] = berth, #identity, identity
  end
end
local key = prefix .. 'names'
local size = redis.pcall('HLEN', key)
if type(size) == 'number' and size <= max_berths then
  local entries = redis.pcall('HGETALL', key)
  for index = 1, #entries, 2 do own(entries[index], entries[index + 1]) end
else
  reply[5] = ''
  local first = held[1]
  for begin = 1, #first / 2, 512 do
    local berths = {}
    for position = begin, math.min(begin + 511, #first / 2) do
      berths[#berths + 1] = berth_at(first, position)
    end
    local some = redis.pcall('HMGET', key, unpack(berths))
    for position, berth in ipairs(berths) do own(berth, some[position]) end
  end
end
reply[6], reply[7], reply[8] = joined(owners), joined(sizes), table.concat(identities)
return reply
