-- Lists the records of live berths, a page at a time, in the order of berths.
-- ARGV: berth to begin after, highest berth, most records, most bytes of a field, most bytes of a page.
-- Returns {berth to go on after, records}; 0 on the last page.
-- include prelude

-- include live

local after, max_berths, max_records = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local max_field_bytes, bytes_left, reply = tonumber(ARGV[4]), tonumber(ARGV[5]), {}

local berths = {}
for berth in pairs(live) do
  if berth > after and berth <= max_berths and berth % 1 == 0 then berths[#berths + 1] = berth end
end
table.sort(berths)

-- Return nil for a record that our scripts did not write. The proof may be missing.
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
