"""Lua scripts for a sink and its readers. Redis runs each script atomically.

Keys of a sink with prefix ``p``; because of the braces a cluster stores all in one slot::

    {p}:token              the writer: "<count>:<uuid>:<number>", the sink that was opened last, and how often
    {p}:sequence           number of the newest batch
    {p}:current            the visible state: generation, sequence (two big-endian uint64), then a JSON document
    {p}:pending            the batch that is being written: sequence, generation, whether it is full (a byte), and how
                           many of its steps (`PUT`, `DELETE`) have run
    {p}:written            rows of batches that are not settled: a list of chunks, table name, NUL, int64 ids
    {p}:garbage            generations whose rows are pending delete
    {p}:<generation>:<table>:<row id>

A row's value has one entry, or two while a batch is written: sequence (uint64), length + 1 (uint32; 0: the row is
absent from this entry on), the bytes. A reader uses the last entry that is not newer than ``current``, so it never sees
an uncommitted batch. *Settling* a row keeps only that entry: after a commit it deletes what the batch replaced, after a
crash what the batch had written. A full batch writes rows of a new generation, so that no earlier row stays visible.
The old generation is deleted when the new one is current.

Every script may run twice, because a reply can be lost. A late second run does not change the visible state. A late
`DROP` or `BEGIN` drops the batch that is being written then, and its writer starts it again. A server that was restored
from an older copy has lost all later writes. So a batch begins only if `current` is what the writer expects, and
commits only if all its steps have run.
"""

from __future__ import annotations

_GUARD = """
local token = redis.call('GET', KEYS[1])
if token ~= ARGV[1] then
  local found = token and tonumber(string.match(token, '^%d+')) or 0
  if found < tonumber(string.match(ARGV[1], '^%d+')) then return redis.error_reply('CNRLOST') end
  return redis.error_reply('CNRFENCED')
end
"""

_ENTRIES = """
local function chosen(value, newest)
  local sequence, size, after = struct.unpack('>I8I4', value)
  local stop = after - 1 + (size > 0 and size - 1 or 0)
  local first, last = 1, stop
  local present = size > 0
  if sequence > newest then return nil end
  if stop < #value then
    sequence, size, after = struct.unpack('>I8I4', value, stop + 1)
    if sequence <= newest then
      first, last = stop + 1, #value
      present = size > 0
    end
  end
  return first, last, present
end
"""

OPEN = """
local token = redis.call('GET', KEYS[1])
local count, sink, opens = string.match(token or '0::0', '^(%d+):(.*):(%d+)$')
if sink ~= ARGV[1] or tonumber(opens) < tonumber(ARGV[2]) then
  local held = tonumber(string.match(ARGV[3], '^%d+'))
  if held and sink ~= ARGV[1] and tonumber(count) > held then return redis.error_reply('CNRFENCED') end
  token = string.format('%d:%s:%s', count + 1, ARGV[1], ARGV[2])
  redis.call('SET', KEYS[1], token)
end
return {token, redis.call('GET', KEYS[2])}
"""
"""KEYS token, current; ARGV the uuid of the sink, the number of this open, the token that the sink had or an empty one.

Returns the new token and `current`. A sink that had one may come back after an error: not if another was opened since.
A smaller count is that of a server that was emptied, or restored from an older copy.
"""

DROP = (
    _GUARD
    + """
local pending = redis.call('GET', KEYS[2])
if pending then
  local sequence, generation, full = struct.unpack('>I8I8B', pending)
  if full == 1 then redis.call('SADD', KEYS[3], string.format('%d', generation)) end
  redis.call('DEL', KEYS[2])
end
return redis.call('LINDEX', KEYS[4], 0)
"""
)
"""Drop the pending batch. KEYS token, pending, garbage, written; ARGV token. Returns the first unsettled chunk."""

SETTLE = (
    _GUARD
    + _ENTRIES
    + """
if redis.call('EXISTS', KEYS[4]) == 1 then return redis.error_reply('CNRLOST') end
local current = redis.call('GET', KEYS[2])
local generation, newest = 0, -1
if current then generation, newest = struct.unpack('>I8I8', current) end
if string.format('%d', generation) ~= ARGV[3] then return redis.error_reply('CNRLOST') end
if redis.call('LINDEX', KEYS[3], 0) == ARGV[2] then
  for i = 5, #KEYS do
    local value = redis.call('GET', KEYS[i])
    if value then
      local first, last, present = chosen(value, newest)
      if not present then redis.call('DEL', KEYS[i])
      elseif last - first + 1 < #value then redis.call('SET', KEYS[i], string.sub(value, first, last)) end
    end
  end
  redis.call('LPOP', KEYS[3])
end
return redis.call('LINDEX', KEYS[3], 0)
"""
)
"""Settle the rows of the first chunk. Fails if a batch is pending: a late second run would undo that batch's rows.

Fails if the generation has changed: after a full batch the same chunk may contain rows of the next generation.

KEYS token, current, written, pending, rows; ARGV token, the chunk, the rows' generation (0 where there is no
`current`). Returns the next."""

BEGIN = (
    _GUARD
    + """
if redis.call('EXISTS', KEYS[5]) == 1 then return redis.error_reply('CNRUNSETTLED') end
local current = redis.call('GET', KEYS[2])
if (current and string.sub(current, 1, 16) or '') ~= ARGV[3] then return redis.error_reply('CNRLOST') end
local full = tonumber(ARGV[2])
if full == 0 and not current then return redis.error_reply('CNREMPTY') end
local sequence = redis.call('INCR', KEYS[4])
local generation = sequence
if full == 0 then generation = struct.unpack('>I8', current) end
local pending = redis.call('GET', KEYS[3])
if pending then
  local _, old, was_full = struct.unpack('>I8I8B', pending)
  if was_full == 1 then redis.call('SADD', KEYS[6], string.format('%d', old)) end
end
redis.call('SET', KEYS[3], struct.pack('>I8I8BI8', sequence, generation, full, 0))
return {sequence, generation}
"""
)
"""KEYS token, current, pending, sequence, written, garbage; ARGV token, full, the first 16 bytes of the `current` that
the writer expects (empty: none). Returns sequence and generation."""

_PENDING = """
local pending = redis.call('GET', KEYS[2])
if not pending or string.sub(pending, 1, 8) ~= ARGV[2] then return redis.error_reply('CNRLOST') end
local full = string.byte(pending, 17) == 1
local step, steps = tonumber(ARGV[3]), struct.unpack('>I8', pending, 18)
if steps >= step then return 0 end
if steps < step - 1 then return redis.error_reply('CNRLOST') end
"""

_STEPPED = """
redis.call('SET', KEYS[2], string.sub(pending, 1, 17) .. struct.pack('>I8', step))
return #KEYS - 3
"""

_KEPT = """
local function kept(value)
  if not value then return '' end
  local _, size = struct.unpack('>I8I4', value)
  if string.sub(value, 1, 8) == ARGV[2] then return '' end
  return string.sub(value, 1, 12 + (size > 0 and size - 1 or 0))
end
"""

PUT = (
    _GUARD
    + _PENDING
    + _KEPT
    + """
if not full then redis.call('RPUSH', KEYS[3], ARGV[4]) end
local width = tonumber(ARGV[5])
local head = ARGV[2] .. struct.pack('>I4', width + 1)
for i = 4, #KEYS do
  local entry = head .. string.sub(ARGV[6], (i - 4) * width + 1, (i - 3) * width)
  if not full then entry = kept(redis.call('GET', KEYS[i])) .. entry end
  redis.call('SET', KEYS[i], entry)
end
"""
    + _STEPPED
)
"""KEYS token, pending, written, rows; ARGV token, sequence (8 bytes), number of the step from 1,
chunk, width, the rows' bytes in order."""

DELETE = (
    _GUARD
    + _PENDING
    + _KEPT
    + """
if not full then redis.call('RPUSH', KEYS[3], ARGV[4]) end
for i = 4, #KEYS do
  local value = redis.call('GET', KEYS[i])
  local before = full and '' or kept(value)
  if before ~= '' then redis.call('SET', KEYS[i], before .. ARGV[2] .. struct.pack('>I4', 0))
  elseif value then redis.call('DEL', KEYS[i]) end
end
"""
    + _STEPPED
)
"""KEYS token, pending, written, rows; ARGV token, sequence (8 bytes), number of the step from 1, chunk."""

COMMIT = (
    _GUARD
    + """
local current = redis.call('GET', KEYS[2])
if current and string.sub(current, 9, 16) == ARGV[2] then return 1 end
local pending = redis.call('GET', KEYS[3])
if not pending or string.sub(pending, 1, 8) ~= ARGV[2] or struct.unpack('>I8', pending, 18) ~= tonumber(ARGV[3]) then
  return redis.error_reply('CNRLOST')
end
if string.byte(pending, 17) == 1 and current then
  redis.call('SADD', KEYS[4], string.format('%d', struct.unpack('>I8', current)))
end
redis.call('SET', KEYS[2], string.sub(pending, 9, 16) .. ARGV[2] .. ARGV[4])
redis.call('DEL', KEYS[3])
return 1
"""
)
"""KEYS token, current, pending, garbage; ARGV token, sequence (8 bytes), number of steps, the document."""

CLEAR = (
    _GUARD
    + """
local current = redis.call('GET', KEYS[2])
if current and string.format('%d', struct.unpack('>I8', current)) == ARGV[2] then
  return redis.error_reply('CNRLOST')
end
for i = 3, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1
"""
)
"""Remove rows of a generation that is not current. KEYS token, current, rows; ARGV token, the generation."""

READ = (
    _ENTRIES
    + """
local current = redis.call('GET', KEYS[1])
if not current then return {false} end
local generation, newest = struct.unpack('>I8I8', current)
if string.format('%d', generation) ~= ARGV[1] then return {current} end
local out = {current}
local key = 2
for table_index = 2, #ARGV, 2 do
  local width = tonumber(ARGV[table_index + 1])
  local empty = string.rep('\\0', width)
  local marks, parts = {}, {}
  for i = 1, tonumber(ARGV[table_index]) do
    local value = redis.call('GET', KEYS[key])
    key = key + 1
    marks[i], parts[i] = '\\0', empty
    if value then
      local first, last, present = chosen(value, newest)
      if present then
        if last - first - 11 ~= width then return {current, KEYS[key - 1]} end
        marks[i], parts[i] = '\\1', string.sub(value, first + 12, last)
      end
    end
  end
  out[#out + 1] = table.concat(marks)
  out[#out + 1] = table.concat(parts)
end
return out
"""
)
"""KEYS current, rows; ARGV generation, then count and width per table. Returns `current`, then marks and bytes of each
table's rows; only `current` if the generation differs; `current` and a row's key if that row has another width."""
