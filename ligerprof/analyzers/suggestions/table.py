"""The table of suggestions: when each applies, what it saves, what it costs, and how to make it in each framework."""

from ligerprof.analyzers.suggestions.pass_rows import PASS_ROWS
from ligerprof.analyzers.suggestions.row import Row
from ligerprof.analyzers.suggestions.sharding_rows import SHARDING_ROWS
from ligerprof.analyzers.suggestions.state_rows import STATE_ROWS

ROWS: tuple[Row, ...] = (*PASS_ROWS, *SHARDING_ROWS, *STATE_ROWS)
