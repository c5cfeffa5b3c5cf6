"""Where a program works: which sequence, which tokens, which slots of the per-chunk buffers. One walk serves every
role.

Slots (ForwardArguments.num_slots): chunk c of sequence n has the slot cu_seqlens[n] // 64 + n + c in a packed batch and
n * ceil(T / 64) + c otherwise, so that no prefix sum and no host synchronisation is needed.
Example: lengths 70, 0, 64 give cu_seqlens 0, 70, 70, 134; first slots 0, 2, 3; the chunks use slots 0, 1, 3; slots 2
and 4 stay empty.
"""

from tilecrew.device.compat import aggregate, gl, gluon
from tilecrew.gated_delta_rule.chunk_sizes import CHUNK


@aggregate
class ChunkWalk:
    """The chunks of one piece of one sequence, for one value head and one block of V.

    batch, token_start   row and first token of the piece in [B, T, ...] tensors
    num_tokens           from token_start to the end of the sequence
    num_chunks           of this piece
    first_slot           slot of its first chunk
    head, value_offset   value head; first column of the block of V
    piece                row of initial_state
    sequence             row of final_state
    ends_sequence        1 where this piece is the sequence's last
    """

    batch: gl.tensor
    token_start: gl.tensor
    num_tokens: gl.tensor
    num_chunks: gl.tensor
    first_slot: gl.tensor
    head: gl.tensor
    value_offset: gl.tensor
    piece: gl.tensor
    sequence: gl.tensor
    ends_sequence: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        batch,
        token_start,
        num_tokens,
        num_chunks,
        first_slot,
        head,
        value_offset,
        piece,
        sequence,
        ends_sequence,
    ):
        self.batch = batch
        self.token_start = token_start
        self.num_tokens = num_tokens
        self.num_chunks = num_chunks
        self.first_slot = first_slot
        self.head = head
        self.value_offset = value_offset
        self.piece = piece
        self.sequence = sequence
        self.ends_sequence = ends_sequence

    @gluon.jit
    def create(
        num_tokens,
        cu_seqlens,
        pieces,
        NUM_VALUE_HEADS: gl.constexpr,
        NUM_BLOCKS: gl.constexpr,
        BLOCK_V: gl.constexpr,
        VARLEN: gl.constexpr,
        HAS_PIECES: gl.constexpr,
    ):
        """Program -> (piece, head, block of V), blocks fastest: neighbours share Q, K and A in the L2 cache.

        pieces: [P, 3] int32, rows (sequence, first chunk, chunk behind the last), where HAS_PIECES; else a piece is a
            sequence.
        """
        program = gl.program_id(0)
        block = program % NUM_BLOCKS
        head = (program // NUM_BLOCKS) % NUM_VALUE_HEADS
        piece = program // (NUM_BLOCKS * NUM_VALUE_HEADS)
        sequence = piece
        if HAS_PIECES:
            sequence = gl.load(pieces + piece * 3)
        batch = sequence
        start = gl.to_tensor(0)
        length = num_tokens
        sequence_slot = sequence * gl.cdiv(num_tokens, CHUNK)
        if VARLEN:
            batch = gl.to_tensor(0)
            start = gl.load(cu_seqlens + sequence).to(gl.int32)
            length = gl.load(cu_seqlens + sequence + 1).to(gl.int32) - start
            sequence_slot = start // CHUNK + sequence
        sequence_chunks = gl.cdiv(length, CHUNK)
        first_chunk = gl.to_tensor(0)
        end_chunk = sequence_chunks
        if HAS_PIECES:
            first_chunk = gl.load(pieces + piece * 3 + 1)
            end_chunk = gl.load(pieces + piece * 3 + 2)
        return ChunkWalk(
            batch,
            start + first_chunk * CHUNK,
            length - first_chunk * CHUNK,
            end_chunk - first_chunk,
            sequence_slot + first_chunk,
            head,
            block * BLOCK_V,
            piece,
            sequence,
            (end_chunk == sequence_chunks).to(gl.int32),
        )

    @gluon.jit
    def token(self, chunk):
        """First token of a chunk."""
        return self.token_start + chunk * CHUNK

    @gluon.jit
    def tokens_left(self, chunk):
        """Tokens from the chunk's first to the end of the sequence; below 64 the chunk is partial."""
        return self.num_tokens - chunk * CHUNK

    @gluon.jit
    def slot_head(self, chunk, NUM_VALUE_HEADS: gl.constexpr):
        """Row of a [slots * HV, ...] buffer."""
        return (self.first_slot + chunk) * NUM_VALUE_HEADS + self.head


@gluon.jit
def find_chunk(slot, num_tokens, cu_seqlens, num_sequences, VARLEN: gl.constexpr):
    """Slot -> (batch row, first token, tokens of the chunk); no tokens where no chunk has the slot.

    Packed: a binary search for the last sequence whose first slot is at most `slot`.
    """
    if VARLEN:
        low = gl.to_tensor(0)
        high = num_sequences
        while high - low > 1:
            middle = (low + high) // 2
            first = gl.load(cu_seqlens + middle).to(gl.int32) // CHUNK + middle
            low = gl.where(first <= slot, middle, low)
            high = gl.where(first <= slot, high, middle)
        start = gl.load(cu_seqlens + low).to(gl.int32)
        length = gl.load(cu_seqlens + low + 1).to(gl.int32) - start
        chunk = slot - start // CHUNK - low
        batch = gl.to_tensor(0)
        token = start + chunk * CHUNK
        left = length - chunk * CHUNK
    else:
        slots = gl.cdiv(num_tokens, CHUNK)
        batch = slot // slots
        token = (slot % slots) * CHUNK
        left = num_tokens - token
    return batch, token, gl.minimum(gl.maximum(left, 0), CHUNK)
