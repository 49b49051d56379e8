-- Apply changes, each to its own row, if it is newer than what is held.
--
-- KEYS  the hash that is the guard (only if ARGV[1] is not 0), then per change: row, tombstone
-- ARGV  count of the guard's fields, lifetime of a tombstone in ms;
--       per field of the guard: name, and the lowest and highest number it may be now;
--       per change: version, count, and count field names and values; a count of -1 deletes
--
-- Versions have one width, so their order as text is their order. Returns how many were applied,
-- or -1 if the guard does not hold. A field that is not there is 0 for the guard.

local fields = tonumber(ARGV[1])
local at = 3
for _ = 1, fields do
  local now = tonumber(redis.call('HGET', KEYS[1], ARGV[at]) or 0)
  if now < tonumber(ARGV[at + 1]) or now > tonumber(ARGV[at + 2]) then
    return -1
  end
  at = at + 3
end

local applied = 0
for k = fields > 0 and 2 or 1, #KEYS, 2 do
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
