"""How operations are written in TTGIR: the forms that need no code of their own to be read."""

# How an operation reads after its name | the types of its operands | those of its results | the operations that do.
# "%" a value, "%*" values between commas or none, ",%*" more of them; "{}" attributes, "~" attributes without braces;
# "t" a type, "t*" types between commas, ":t*" these or nothing, "(t)" types in parentheses or one type; "kind:x" a
# value of that kind for attribute x; anything else stands for itself. Types: "1" what the second place for types names,
# "0:i1" the same with elements i1, "0:*" with what it points to, "..." once for each operand left; where operands may
# be missing, they are the last ones.
TABLE = """
% {} : t | 0 | 0 | arith.negf math.absf math.absi math.ceil math.cos math.erf math.exp math.exp2 math.floor math.log
% {} : t | 0 | 0 | math.log2 math.rsqrt math.sin math.sqrt
% , % {} : t | 0 0 | 0 | arith.addi arith.subi arith.muli arith.divsi arith.divui arith.remsi arith.remui arith.andi
% , % {} : t | 0 0 | 0 | arith.ori arith.xori arith.shli arith.shrsi arith.shrui arith.maxsi arith.minsi arith.maxui
% , % {} : t | 0 0 | 0 | arith.minui arith.addf arith.subf arith.mulf arith.divf arith.remf arith.maxnumf arith.minnumf
% , % {} : t | 0 0 | 0 | arith.maximumf arith.minimumf tt.approx_divf
% , % , % {} : t | 0 0 0 | 0 | math.fma
% {} : t to t | 0 | 1 | arith.extsi arith.extui arith.trunci arith.extf arith.truncf arith.sitofp arith.uitofp
% {} : t to t | 0 | 1 | arith.fptosi arith.fptoui arith.bitcast arith.index_cast
% {} : t -> t | 0 | 1 | tt.splat tt.broadcast tt.expand_dims tt.reshape tt.trans tt.bitcast tt.ptr_to_int tt.int_to_ptr
% {} : t -> t | 0 | 1 | ttg.convert_layout ttg.local_load ttg.memdesc_trans ttg.memdesc_reinterpret
word:predicate , % , % {} : t | 0 0 | 0:i1 | arith.cmpi arith.cmpf
% , % , % {} : condition | 0 1 1 | 1 | arith.select
% , % {} : t , t | 0 1 | 0 | tt.addptr
word:axis {} : t | | 0 | tt.get_program_id tt.get_num_programs
{} : t | | 0 | tt.make_range
% , % {} : t -> t | 0 0 | 1 | tt.join
% {} : t -> t | 0 | 1 1 | tt.split
% ,%* ~ {} : t | 0 0:i1 0:* | 0:* | tt.load
% , % ,%* ~ {} : t | 0 0:* 0:i1 | | tt.store
word:operation , word:sem , word:scope , % , % ,%* {} : (t) -> (t) | 0 | 1 | tt.atomic_rmw
word:sem , word:scope , % , % , % {} : (t) -> (t) | 0 | 1 | tt.atomic_cas
% , % , % ~ {} : t * t -> t | 0 1 2 | 2 | tt.dot
% , % , % ,%* {} : t * t -> t | 0 1 2 i1 | 2 | ttng.warp_group_dot
% ,%* {} : t* | 0 | 0 | ttng.warp_group_dot_wait
string:asm {} %* :t* -> t* | 0 | 1 | tt.elementwise_inline_asm
@ word:callee ( %* ) {} : (t) -> (t) | 0 | 1 | tt.call
%* {} : (t) -> (t) | 0 | 1 | ttg.local_alloc
% , % {} : t -> t | 0 1 | | ttg.local_store
% {} : t | 0 | | ttg.local_dealloc ttng.inval_barrier
% [ % ] {} : t -> t | 0 i32 | 1 | ttg.memdesc_index
% [ integers:offsets ] {} : t -> t | 0 | 1 | ttg.memdesc_subslice
% , integer:count {} : t | 0 | | ttng.init_barrier
% , integer:size , % {} : t | 0 i1 | | ttng.barrier_expect
% , integer:count ,%* {} : t | 0 i1 | | ttng.arrive_barrier
% , % ,%* {} : t | 0 i32 i1 | | ttng.wait_barrier
% [ % ,%* ] % , % , % ~ {} : t , t -> t | 0 i32... 2 1 i1 | | ttng.async_tma_copy_global_to_local
% [ % ,%* ] % {} : t , t | 0 i32... 1 | | ttng.async_tma_copy_local_to_global
word:spaces {} | | | ttg.barrier
{} | | | gpu.barrier ttng.fence_async_shared ttng.async_tma_store_wait
%* {} :t* | 0 | | scf.yield tt.return tt.reduce.return tt.scan.return ttg.warp_yield ttg.warp_return
( % ) %* {} :t* | i1 0 | | scf.condition
"""
FORMS: dict[str, list[list[str]]] = {
    name: [part.split() for part in line.split("|")[:3]]
    for line in TABLE.strip().split("\n")
    for name in line.split("|")[3].split()
}
REQUIRED = {
    **dict.fromkeys(("tt.trans", "ttg.memdesc_trans"), ("order",)),
    **dict.fromkeys(("ttng.warp_group_dot_wait", "ttng.async_tma_store_wait"), ("pendings",)),
    **dict.fromkeys(("tt.expand_dims", "tt.reduce"), ("axis",)),
    "tt.scan": ("axis", "reverse"),
    "tt.make_range": ("start", "end"),
    "tt.elementwise_inline_asm": ("constraints", "packed_element", "pure"),
}
# Words that an attribute, or any of an operation, may be.
WORDS = {
    "operation": "add|fadd|and|or|xor|max|min|umax|umin|exch",
    "sem": "relaxed|acquire|release|acq_rel",
    "scope": "gpu|cta|sys",
    "spaces": "all|local",
    "arith.cmpi": r"eq|ne|[su][lg][te]",
    "arith.cmpf": r"false|true|ord|uno|[ou](eq|ne|[lg][te])",
    **dict.fromkeys(("tt.get_program_id", "tt.get_num_programs"), "[xyz]"),
}
