"""Data rows, in an order that resumes exactly, and rows as arrays of tokens.

Rows are dicts in TRL's shapes: `prompt` (a text or messages) with any other columns; `prompt,
completion`; `messages`; `prompt, chosen, rejected`.

files        reads and checks files
formats      the formats of files
shapes       the published shapes of rows
messages     messages, tools and calls in one form
stored_rows  rows that stay in files, and are read when they are needed
python_rows  rows that a Python program passes
row_stream   shuffles rows and repeats them
encoding     rows as arrays of tokens: demonstrations, pairs, steps
"""

from typing import TYPE_CHECKING

from tpu_rl import lazy

if TYPE_CHECKING:
    from tpu_rl.data.encoding import demonstrations, pairs, scored_completions, steps
    from tpu_rl.data.files import Row, first_row, first_shape, names_of, read
    from tpu_rl.data.row_stream import (
        OF_BYTES,
        Rows,
        RowStream,
        digests,
        fingerprint,
        row_digest,
        rows_of_parts,
        stream,
    )
    from tpu_rl.data.stored_rows import (
        FirstFitting,
        StoredRows,
        join,
        naming_row,
        part_numbers,
        sample,
        take,
        where_of,
        with_number,
    )

lazy.exports(__name__, __file__)
