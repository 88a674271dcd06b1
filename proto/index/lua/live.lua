-- The set of berths with a running lease.

local live = {}
for _, member in ipairs(redis.call('ZRANGEBYSCORE', leases, '(' .. now_ms(), '+inf')) do
  local berth = tonumber(member)
  if berth then live[berth] = true end
end
