// Stands in for the device code of the sm_90a schedules. What is asynchronous on the device is so
// here, in the ways that show mistakes: a copy lands in two parts, each later by some turns of other
// threads; until then its target holds NaN. A product reads its operands where it is issued and again
// where it is waited for, and they must be the same; until then its sums are NaN.
//
// Read for many kernels: what takes a compiler long is in emulator_hopper.cpp, compiled once.

struct __align__(128) tensor_map { u64 w[16]; };

namespace emulator {
// A product of 64 rows, of which `rows` are there, and n columns.
template <class T> void product(float* d, int n, int rows, u64 a, u64 b);
// With the left operand in registers, and a right one whose rows run along k if `across`.
template <class T> void product_left(float* d, int n, bool across, const u32* a, u64 b, bool keep);
template <int N, int ROWS = 64, class T> void product(float* d, u64 a, u64 b, T) {
  product<T>(d, N, ROWS, a, b);
}
template <int N, bool ACROSS, class T> void product_left(float* d, const u32* a, u64 b, bool keep, T) {
  product_left<T>(d, N, ACROSS, a, b, keep);
}
void wait_for_products(int but);
void copy(u32 to, const tensor_map* map, u32 barrier, const i64* first, int axes);
void wait_for_stores(int but, bool placed);
}  // namespace emulator

DEV int uniform(int v) { return v; }
DEV void meet(int threads) { emulator::meet(1, threads); }
void come_by(int threads);
DEV void wait_for_all(int threads) { emulator::meet(15, threads); }
template <int N> DEV void more_registers() {}
template <int N> DEV void fewer_registers() {}
void barrier_init(u32 at, u32 arrivals);
void barriers_ready();
void barrier_arrive(u32 at);
void barrier_arrive_warp(u32 at);
void barrier_expect(u32 at, u32 bytes);
void barrier_wait(u32 at, u32 parity);
// Coordinates innermost first.
template <class... C> DEV void copy_box(u32 to, const tensor_map* map, u32 barrier, C... given) {
  const i64 first[] = {given...};
  emulator::copy(to, map, barrier, first, sizeof...(given)); }
template <class... C>
DEV void copy_box_once(u32 to, const tensor_map* map, u32 barrier, u64, C... given) {
  copy_box(to, map, barrier, given...); }
DEV u64 read_once() { return 0; }
void wgmma_begin();
void wgmma_commit();
template <int N> DEV void wgmma_wait() { emulator::wait_for_products(N); }
template <int N> DEV void wgmma_sums(float*) {}

// -- boxes that are stored -----------------------------------------------------------------------

DEV void meet_group(int group) { emulator::meet(2 + group, 128); }
void store_matrices(u32 at, u32 a, u32 b, u32 c, u32 d);
void boxes_filled();
void store_box(const tensor_map* map, u32 from, int c0, int c1);
template <int N> DEV void boxes_read() { emulator::wait_for_stores(N, false); }
DEV void boxes_stored() { emulator::wait_for_stores(0, true); }

// -- attention ---------------------------------------------------------------------------------

DEV void take_turn(int group, int threads) { emulator::meet(2 + group, threads); }
void pass_turn(int group, int threads);
bool any_lane(bool v);
DEV float quick_exp2(float v) {
  const float r = std::exp2(v); return r < 0x1p-126f ? 0.0f : r; }
template <class T> DEV u32 pack_floats(float a, float b, T) {
  return pack(to<T>::from(a), to<T>::from(b)); }

// -- attention of few rows ---------------------------------------------------------------------

DEV void map_ahead(const tensor_map*) {}
DEV void warp_meets() { emulator::meet_warp(); }
u32 transposed(u32 v);

// -- clusters ----------------------------------------------------------------------------------

DEV int cluster_rank() { return emulator::block(); }
void cluster_arrive();
void cluster_wait();
DEV u32 in_block(u32 at, int rank) { return at % emulator::SPACE + rank * emulator::SPACE; }
void send4(u32 to, const float* v, u32 barrier);
DEV void take4(float* v, u32 at) { std::memcpy(v, smem + at, 16); }
