-- Take the next token: above the last one, and not below the time in ARGV[1].
-- KEYS  the sink's ledger

local token = tonumber(redis.call('HGET', KEYS[1], 'token') or 0) + 1
token = math.max(token, tonumber(ARGV[1]))
redis.call('HSET', KEYS[1], 'token', string.format('%.0f', token))
return token
