-- Move a partition's next offset forward, if the token is the present one.
-- KEYS  the sink's ledger, the topic's entry
-- ARGV  token, field of the partition, next offset
-- Returns the present token, or '' if it is lost.

local token = redis.call('HGET', KEYS[1], 'token')
if token == ARGV[1] then
  local held = tonumber(redis.call('HGET', KEYS[2], ARGV[2]) or -1)
  if held < tonumber(ARGV[3]) then
    redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
  end
end
return token or ''
