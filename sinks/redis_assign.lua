-- Set the ledger anew, if the token is the present one. Returns the present token, or '' if lost.
-- KEYS  the sink's ledger, then the entries of all topics, old and new
-- ARGV  token, the list of topics, then per entry: count, and count field names and values

local token = redis.call('HGET', KEYS[1], 'token')
if token ~= ARGV[1] then
  return token or ''
end
redis.call('HSET', KEYS[1], 'topics', ARGV[2])
local at = 3
for k = 2, #KEYS do
  local count = tonumber(ARGV[at])
  redis.call('DEL', KEYS[k])
  if count > 0 then
    redis.call('HSET', KEYS[k], unpack(ARGV, at + 1, at + count))
  end
  at = at + 1 + count
end
return token
