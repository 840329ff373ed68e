"""Device code of the sm_90a schedules: barriers with phases, copies of boxes, warpgroup products.

PTX instructions are those of the PTX ISA: mbarrier, cp.async.bulk.tensor, wgmma, setmaxnreg, bar,
ex2, cvt, movmatrix, prefetch.tensormap.
Addresses of shared memory are 32 bits, as `shared_address` gives them.
"""

__all__ = [
    "ATTENTION_TEMPLATES",
    "BOX_TEMPLATES",
    "ONCE_TEMPLATES",
    "PORTABLE_ATTENTION",
    "PORTABLE_BOXES",
    "PORTABLE_ROWS",
    "PORTABLE_TEMPLATES",
    "ROW_TEMPLATES",
    "TEMPLATES",
    "copy_box",
    "wgmma",
    "wgmma_left",
    "wgmma_some",
]

PORTABLE_TEMPLATES = r"""// Coordinates beyond any array stay beyond it.
DEV int coordinate(i64 v) {
  const i64 limit = 0x7fff0000; return (int)(v > limit ? limit : v < -limit ? -limit : v); }

// Word i of lane j of a quad for word j of lane i.
DEV void exchange_quad(u32* w) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool high = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const u32 got = shuffle_xor(high ? w[i] : w[i + bit], bit);
      if (high) w[i] = got; else w[i + bit] = got;
    }
  }
}

// As `exchange_quad` for pairs of words.
DEV void exchange_pairs(u32* w) {
  u32 first[4], second[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) { first[i] = w[2 * i]; second[i] = w[2 * i + 1]; }
  exchange_quad(first);
  exchange_quad(second);
#pragma unroll
  for (int i = 0; i < 4; ++i) { w[2 * i] = first[i]; w[2 * i + 1] = second[i]; }
}

// Rows of 128 bytes, their 16-byte pieces swizzled within 8 rows, k along the row; see "Matrix
// Descriptor Format" of the PTX ISA. The next 16 elements along k are 2 further on.
DEV u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }
DEV u64 descriptor(u32 at) {
  return (u64)(at >> 4 & 0x3fffu) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62; }
"""
"""The part that is plain C++, for any compiler."""

TEMPLATES = r"""
struct __align__(128) tensor_map { u64 w[16]; };
DEV void map_ahead(const tensor_map* map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }
DEV int uniform(int v) { return __shfl_sync(~0u, v, 0); }
DEV void warp_meets() { __syncwarp(); }
// Of a block's threads some come by, whole warps, and others wait until all have.
DEV void come_by(int threads) { asm volatile("bar.arrive 15, %0;" :: "r"(threads) : "memory"); }
DEV void wait_for_all(int threads) { asm volatile("bar.sync 15, %0;" :: "r"(threads) : "memory"); }
// For some threads of a block, whole warps.
DEV void meet(int threads) { asm volatile("bar.sync 1, %0;" :: "r"(threads) : "memory"); }
template <int N> DEV void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }
template <int N> DEV void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }

DEV void barrier_init(u32 at, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at), "r"(arrivals) : "memory"); }
// What has been initialised becomes known to the copy engine.
DEV void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Of a warp that has read what the copy engine may overwrite then. Without the fence the arrival
// can overtake loads that are under way: it does where another block keeps their queue full.
DEV void barrier_arrive_warp(u32 at) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory"); }
DEV void barrier_arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory"); }
// An arrival that announces bytes: the phase ends when they are there as well.
DEV void barrier_expect(u32 at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
    :: "r"(at), "r"(bytes) : "memory"); }
// Until the phase of a parity has ended; that before the first one counts as ended, of parity 1.
DEV void barrier_wait(u32 at, u32 parity) {
  asm volatile("{\n"
    ".reg .pred done;\n"
    "again:\n"
    "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
    "@!done bra again;\n"
    "}" :: "r"(at), "r"(parity) : "memory"); }

DEV void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEV void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
// Nothing that reads the sums is moved above this.
template <int N> DEV void wgmma_sums(float* d) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i]) :: "memory"); }
"""

ONCE_TEMPLATES = r"""
// What is read once makes room in the second-level cache first.
DEV u64 read_once() {
  u64 r; asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(r)); return r; }
"""
"""For `copy_box_once`."""

PORTABLE_BOXES = r"""
// Where the row of a matrix that this lane points at lies in a box of 128-byte rows, swizzled: four
// matrices are 16 rows of a warp and 16 columns, from that of a 16-byte piece on.
DEV u32 in_box(u32 box, int piece) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  return box + row * 128 + ((piece + lane / 16) ^ row % 8) * 16; }
"""
"""What boxes that are stored have besides, in plain C++."""

BOX_TEMPLATES = r"""
// Four 8x8 matrices of 16-bit elements: lane 8 * i + j points at row j of matrix i.
DEV void store_matrices(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
    :: "r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory"); }
// For one warpgroup.
DEV void meet_group(int group) { asm volatile("bar.sync %0, 128;" :: "r"(2 + group) : "memory"); }
// What this thread has written becomes known to the copy engine.
DEV void boxes_filled() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Coordinates innermost first; what lies outside of the array is left out.
DEV void store_box(const tensor_map* map, u32 from, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
    :: "l"(map), "r"(from), "r"(c0), "r"(c1) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until no more than N of the boxes that this thread had stored are still to be read.
template <int N> DEV void boxes_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory"); }
// Until all are in their places.
DEV void boxes_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
"""

PORTABLE_ATTENTION = r"""
// As `descriptor` for an operand whose rows run along k, 64 columns of 128 bytes beside each other
// and the next 64 a block of bytes further on. The next 16 rows are 128 further on.
DEV u64 descriptor_across(u32 at, u32 block) {
  return (u64)(at >> 4 & 0x3fffu) | (u64)(block >> 4) << 16 | (u64)(1024 >> 4) << 32
    | (u64)1 << 62; }
"""
"""What attention has besides, in plain C++."""

ATTENTION_TEMPLATES = r"""
// Warpgroups take turns: what of them waits for its turn, and what of them passes it on.
DEV void take_turn(int group, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(2 + group), "r"(threads) : "memory"); }
DEV void pass_turn(int group, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(2 + group), "r"(threads) : "memory"); }
DEV bool any_lane(bool v) { return __any_sync(~0u, v); }
// Of which what is below the least normal number is 0.
DEV float quick_exp2(float v) {
  float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
DEV u32 pack_floats(float a, float b, bf16) {
  u32 r; asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a)); return r; }
DEV u32 pack_floats(float a, float b, f16) {
  u32 r; asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a)); return r; }
"""

PORTABLE_ROWS = r"""
// Of an element in a tile of rows, 64 columns after 64 columns, as the copy engine leaves it.
DEV u32 box_place(u32 at, int rows, int row, int column) {
  return at + (column / 64 * rows + row) * 128 + (column % 64 * 2 ^ row % 8 * 16); }
"""
"""What attention of few rows has besides, in plain C++."""

ROW_TEMPLATES = r"""
// Lane i has elements 2 (i % 4) and the next of row i / 4 of an 8 x 8 tile; then of its transpose.
DEV u32 transposed(u32 v) {
  u32 r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v)); return r; }
"""


def copy_box(axes: int, once: bool = False) -> str:
    """C++ of `copy_box`: start the copy of a box to shared memory; coordinates innermost first.

    Args:
        once: for `copy_box_once`, of what the second-level cache need not keep.
    """
    names = [f"c{i}" for i in range(axes)]
    given = ", ".join(f"int {n}" for n in names)
    places = ", ".join(f"%{i + 3}" for i in range(axes))
    values = ", ".join(f'"r"({n})' for n in names)
    if once:
        return f"""
DEV void copy_box_once(u32 to, const tensor_map* map, u32 barrier, u64 once, {given}) {{
  asm volatile("cp.async.bulk.tensor.{axes}d.shared::cluster.global.tile"
    ".mbarrier::complete_tx::bytes.L2::cache_hint"
    " [%0], [%1, {{{places}}}], [%2], %{axes + 3};"
    :: "r"(to), "l"(map), "r"(barrier), {values}, "l"(once) : "memory"); }}
"""
    return f"""
DEV void copy_box(u32 to, const tensor_map* map, u32 barrier, {given}) {{
  asm volatile("cp.async.bulk.tensor.{axes}d.shared::cluster.global.tile"
    ".mbarrier::complete_tx::bytes [%0], [%1, {{{places}}}], [%2];"
    :: "r"(to), "l"(map), "r"(barrier), {values} : "memory"); }}
"""


def wgmma(n: int, ctype: str) -> str:
    """C++ of `wgmma_nN`: d (64 x n, f32) += a (64 x 16) @ b (n x 16).T, by one warpgroup.

    a and b are descriptors. d[j * 4 + c] is element c of columns 8 j to 8 j + 7, as mma.m16n8 has
    it in each of the four warps.
    """
    count = n // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    values = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
DEV void wgmma_n{n}(float* d, u64 a, u64 b, {ctype}) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ctype}.{ctype}"
    " {{{sums}}},"
    " %{count}, %{count + 1}, 1, 1, 1, 0, 0;"
    : {values}
    : "l"(a), "l"(b)); }}
"""


def wgmma_some(n: int, ctype: str) -> str:
    """C++ of `wgmma_some_nN`: as `wgmma_nN` where only the first ROWS rows of a are there.

    What lies behind them is read as it is, and adds to sums that nobody looks at.
    """
    return f"""
template <int ROWS> DEV void wgmma_some_n{n}(float* d, u64 a, u64 b, {ctype} t) {{
  wgmma_n{n}(d, a, b, t); }}
"""


def wgmma_left(n: int, ctype: str) -> str:
    """C++ of `wgmma_left_nN`: d (64 x n, f32) = a (64 x 16) @ b + d, by one warpgroup.

    a lies in registers, as the sums of 16 columns do, in pairs. b is a descriptor, of (n x 16).T
    or, ACROSS, of 16 x n. KEEP: whether d is added, or not looked at.
    """
    count = n // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    left = ", ".join(f"%{count + i}" for i in range(4))
    values = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
template <int KEEP, int ACROSS> DEV void wgmma_left_n{n}(float* d, const u32* a, u64 b, {ctype}) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ctype}.{ctype}"
    " {{{sums}}},"
    " {{{left}}}, %{count + 4}, %{count + 5}, 1, 1, %{count + 6};"
    : {values}
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(KEEP), "n"(ACROSS)); }}
"""
