-- Apply changes, each to its own row, if it is newer than what is held.
--
-- KEYS  the sink's ledger (only if ARGV[1] is a token), then per change: row, tombstone
-- ARGV  token or '', lifetime of a tombstone in ms, then per change:
--       version, count, and count field names and values; a count of -1 deletes
--
-- Versions have one width, so their order as text is their order. Returns how many were applied,
-- or -1 if the token is old.

local first = 1
if ARGV[1] ~= '' then
  if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then
    return -1
  end
  first = 2
end

local applied = 0
local at = 3
for k = first, #KEYS, 2 do
  local row, tombstone = KEYS[k], KEYS[k + 1]
  local version, count = ARGV[at], tonumber(ARGV[at + 1])
  local held = redis.call('HGET', row, '__cdc_version')
  local buried = not held and redis.call('GET', tombstone)
  if (held or buried or '') < version then
    if count < 0 then
      redis.call('DEL', row)
      redis.call('SET', tombstone, version, 'PX', ARGV[2])
    else
      -- HSET comes first: a server at maxmemory refuses a script only at its first write, and
      -- would not refuse DEL. Writing over a row is also cheaper than making it anew.
      redis.call('HSET', row, '__cdc_version', version, unpack(ARGV, at + 2, at + 1 + count))
      if redis.call('HLEN', row) > count / 2 + 1 then
        -- Fields of the older row are left: columns that were dropped, or are NULL now.
        redis.call('DEL', row)
        redis.call('HSET', row, '__cdc_version', version, unpack(ARGV, at + 2, at + 1 + count))
      end
      if buried then
        redis.call('DEL', tombstone)
      end
    end
    applied = applied + 1
  end
  at = at + 2 + math.max(count, 0)
end
return applied
