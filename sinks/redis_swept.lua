-- Note that a topic has no rows of older generations, if token and generation are still the same.
-- KEYS  the sink's ledger, the topic's entry
-- ARGV  token, generation
-- Returns the present token, or '' if it is lost.

local token = redis.call('HGET', KEYS[1], 'token')
if token == ARGV[1] and redis.call('HGET', KEYS[2], 'generation') == ARGV[2] then
  redis.call('HDEL', KEYS[2], 'unswept')
end
return token or ''
