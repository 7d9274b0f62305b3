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
    from tpu_rl.data.encoding import demonstrations as demonstrations
    from tpu_rl.data.encoding import pairs as pairs
    from tpu_rl.data.encoding import scored_completions as scored_completions
    from tpu_rl.data.encoding import steps as steps
    from tpu_rl.data.files import Row as Row
    from tpu_rl.data.files import first_row as first_row
    from tpu_rl.data.files import first_shape as first_shape
    from tpu_rl.data.files import names_of as names_of
    from tpu_rl.data.files import read as read
    from tpu_rl.data.row_stream import OF_BYTES as OF_BYTES
    from tpu_rl.data.row_stream import Rows as Rows
    from tpu_rl.data.row_stream import RowStream as RowStream
    from tpu_rl.data.row_stream import digests as digests
    from tpu_rl.data.row_stream import fingerprint as fingerprint
    from tpu_rl.data.row_stream import row_digest as row_digest
    from tpu_rl.data.row_stream import rows_of_parts as rows_of_parts
    from tpu_rl.data.row_stream import stream as stream
    from tpu_rl.data.stored_rows import FirstFitting as FirstFitting
    from tpu_rl.data.stored_rows import ReadInFull as ReadInFull
    from tpu_rl.data.stored_rows import StoredRows as StoredRows
    from tpu_rl.data.stored_rows import join as join
    from tpu_rl.data.stored_rows import naming_row as naming_row
    from tpu_rl.data.stored_rows import part_numbers as part_numbers
    from tpu_rl.data.stored_rows import sample as sample
    from tpu_rl.data.stored_rows import take as take
    from tpu_rl.data.stored_rows import where_of as where_of
    from tpu_rl.data.stored_rows import with_number as with_number

lazy.exports(__name__, __file__)
