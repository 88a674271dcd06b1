-- Finds how many leading blocks of a chain each live berth holds. It bisects: see schema.py.
-- ARGV: packed names, most entries of a compact hash, most holders, most bytes of an identity, whether there must be
-- workers (1 or 0). Returns identity, depth, identity, depth, and so on.
-- include prelude

-- include live

if ARGV[5] == '1' then
  local served = redis.pcall('HMGET', state, 'beat', 'beat_lease')
  if now_ms() - (tonumber(served[1]) or 0) > (tonumber(served[2]) or 0) then
    return redis.error_reply('NOLEASE no worker has a running lease')
  end
end

local names, max_compact = ARGV[1], tonumber(ARGV[2])
local max_holders, max_identity_bytes = tonumber(ARGV[3]), tonumber(ARGV[4])
local total, no_holders, parsed, depths = #names / 8, {}, {}, {}

local function holders(index)
  local value = redis.pcall('HGET', locate(names, index))
  if type(value) ~= 'string' or #value > max_value_bytes then return no_holders end
  if parsed[value] then return parsed[value] end
  local found = {}
  for position = 1, math.floor(#value / 2) do
    local berth = berth_at(value, position)
    if live[berth] then found[#found + 1] = berth end
  end
  parsed[value] = found
  return found
end

-- Set the depth of berths that end between blocks `low` and `high`. `at_low` hold block `low`, and `at_high` block
-- `high`. A berth in `at_low` alone ends between the two.
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

-- A compact hash searches linearly for each field that is asked for. Many fields cost more than all of them.
local function identities(berths)
  local names, found = prefix .. 'names', {}
  local size = redis.pcall('HLEN', names)
  if #berths >= 48 and type(size) == 'number' and size <= max_compact then
    local entries = redis.pcall('HGETALL', names)
    for index = 1, #entries, 2 do found[tonumber(entries[index]) or 0] = entries[index + 1] end
    return found
  end
  for first = 1, #berths, 512 do
    local last = math.min(first + 511, #berths)
    local some = redis.pcall('HMGET', names, unpack(berths, first, last))
    for index = first, last do found[berths[index]] = some[index - first + 1] end
  end
  return found
end

-- A foreign writer may have stored more and longer entries than any cluster has.
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
