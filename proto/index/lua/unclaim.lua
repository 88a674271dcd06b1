-- Gives up a claim of this holder.
-- ARGV: holder.
-- include prelude

local claim = prefix .. 'claim'
if redis.pcall('HGET', claim, 'holder') == ARGV[1] then redis.call('DEL', claim) end
return 'OK'
