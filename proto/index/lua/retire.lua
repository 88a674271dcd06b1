-- Ends the lease of a worker's berths at once.
-- ARGV: berth, epoch, second berth or 0.
-- include prelude

local berths = pair(ARGV[1], ARGV[3])
if owns(berths, ARGV[2]) then
  for _, berth in ipairs(berths) do retire(berth) end
end
return 'OK'
