"""C++ names for the user's names: the same word wherever C++ and the device headers leave it free."""

from __future__ import annotations

import re
import unicodedata
import zlib

KEYWORDS = frozenset(
    """alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl const constexpr
    const_cast continue decltype default delete do double dynamic_cast else enum explicit export extern false float for
    friend goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected
    public register reinterpret_cast return short signed sizeof static static_assert static_cast struct switch template
    this thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while
    xor xor_eq main blockIdx blockDim gridDim threadIdx warpSize""".split()
)
# Words of the emitted text and of the device headers that it calls without a qualifier.
RESERVED = frozenset(
    """abs accumulator adds alive all_reduce all_reduce_multicast at barrier barrier_multicast bf16 blocks cast
    ceil_div check_bounds ci claims cluster_barrier cluster_rank columns combine communicator communicator_blocks
    communicator_kernel config consumer context coordinate coordinate_in_groups ctx cursor deferred device_assert
    expect_loads load_expected load_expected_shared
    e4m3 e5m2 element_of elements enter exchanged expf f16 fetch_add fill fill_nan filled filled_vector floor_div
    floor_mod full gather_async gelu gelu_tanh greatest headers_multicast index_vector iota is_real launch
    launch_begin launch_close launch_open launch_role launch_state least leave linear_tile load load_async load_columns
    local_begin local_close
    load_element load_elements loader log2f logf main_kernel max max_ranks mbarrier memory min mma mma_finish
    mma_order multiply_add narrow_element p packet params peer_view pipeline pk power_of_two prefetch publish
    rank_from reduce reduce_cols reduce_max reduce_min reduce_multicast reduce_rows reduce_sum register_tile
    registers_decrease registers_increase ri role rsqrtf s32 scatter_async shared shared_map shared_tile sigmoid
    signal signal_all signal_all_multicast signal_array signal_each signal_multicast signal_next signals_begin silu
    site sqrtf stagger store store_add_async store_async store_element store_element_everywhere store_elements
    store_everywhere store_wait storer tanhf task task_claims task_slots tasks_before team team_turn tensor_map
    tensor_view to transposed u16 u32 u64 u8 wait wait_each wait_multicast warp warp_index where widen_element
    window zero""".split()
)
# Macros of NVRTC and of the device headers, by name or by prefix.
MACRO = re.compile(
    r"(CU|NV_|PK_|FLT_|DBL_|INT_|UINT_|LONG_|CHAR_|TARGET_|LEGACY_|cuda[A-Z])\w*|NULL|NAN|INFINITY|HUGE_VALF?|NOMINMAX"
    r"|RESOURCE_ABI_BYTES|INSTRUMENTOR_RUNTIME_H|STD|THROWBADALLOC|TRUE|FALSE|EOF|alloca|assert|errno|offsetof"
    r"|va_(arg|copy|end|list|start)|signbit|is(nan|inf|finite|normal)|unix|linux|i386"
)
MAP_MEMBERS = frozenset("launch claims exchanged signal_slots".split())  # of every shared-memory map


class Names:
    """Hands out C++ names, one per user's name: of variables (``local``), of members of the parameter struct."""

    def __init__(self, words: dict[str, str] | None = None) -> None:
        """``words``: what to call some of the user's names."""
        self._words = words or {}
        self._locals: dict[tuple[str, str], str] = {}
        self._taken: set[str] = set()
        self._members: set[str] = set()

    def local(self, name: str, kind: str = "", word: str = "") -> str:
        """The C++ variable for the user's ``name``, always the same one; names of another ``kind`` are other names.

        It is the name itself, or ``word`` of the emitted text, with underscores behind it if it is taken.
        """
        key = (kind, name)
        if key not in self._locals:
            taken = self._taken | KEYWORDS if word else self._taken | KEYWORDS | RESERVED
            word = _word(word or self._words.get(name, name))
            while word in taken:
                word += "_"
            self._locals[key] = word
            self._taken.add(word)
        return self._locals[key]

    def member(self, name: str) -> str:
        """A new member name like ``name``."""
        word = _word(name)
        while word in KEYWORDS or word in self._members:
            word += "_"
        self._members.add(word)
        return word


def entry(kernel: str) -> str:
    """The symbol of ``kernel`` in the cubin: with a prefix that no function of CUDA or C has."""
    return _word(f"pk_{kernel}")


def enumerator(name: str) -> str:
    """``name`` in capitals, in letters that C++ takes."""
    return re.sub(r"_+", "_", ascii_letters(name).upper())


def shared_member(name: str) -> str:
    """Member of the shared-memory map, or of a stage, for the user's pipeline or tile ``name``."""
    word = _word(name)
    if word in KEYWORDS | MAP_MEMBERS or word.startswith("user_"):
        word = f"user_{word}"
    elif re.search(r"_(ring|stage|turn)$", word):  # ``launch_ring`` is no ring of ``launch``
        word = f"user_{word}_"
    return word if word in (name, f"user_{name}", f"user_{name}_") else f"{word}_{zlib.crc32(name.encode()):08x}"


def ascii_letters(name: str) -> str:
    """``name`` in ASCII: accents dropped, other letters by their code, everything else as underscores."""
    letters = unicodedata.normalize("NFKD", name)
    plain = (c if c.isascii() else f"u{ord(c):x}" if c.isalnum() else "" for c in letters)
    return re.sub(r"[^A-Za-z0-9_]", "_", "".join(plain))


def _word(name: str) -> str:
    # C++ keeps names with two underscores, or with one and a capital, for itself.
    word = re.sub(r"_+", "_", ascii_letters(name))
    if not word or word[0].isdigit() or re.match(r"_[A-Z]", word):
        return f"v{word}"
    return f"{word}_" if MACRO.fullmatch(word) else word
