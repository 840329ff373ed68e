// Stands in for the device prelude where generated kernels are compiled as C++ for the host: the
// threads of a block are fibers that run in turn, in another order between any two barriers, so
// that a missing barrier shows. What a warp does together is done at barriers of the warp.
//
// Read for every kernel: what takes a compiler long is in emulator.cpp, which is compiled once.
#include <cmath>
#include <cstdio>
#include <cstring>

template <class T> T max(T a, T b) { return a < b ? b : a; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;
#define __align__(n) __attribute__((aligned(n)))
#define __global__
#define __shared__
#define __launch_bounds__(...)
#define __grid_constant__
#define RESTRICT
#define __device__
#define __noinline__
#define DEV static inline
struct bf16 { u16 x; };
struct f16 { u16 x; };
struct __align__(16) vec16 { u32 w[4]; };
struct __align__(8) vec8 { u32 w[2]; };

extern struct Place { int x; } threadIdx, blockIdx, gridDim;
extern char smem[1 << 21];

// -- fibers ------------------------------------------------------------------------------------

namespace emulator {
const int MOST = 2048, BLOCKS = 8;
const u32 SPACE = 1 << 18;  // of shared memory, from one block of a cluster to the next
extern int threads, block_threads;
extern u64 slots[MOST][8];
extern bool waited[MOST];
// What the kernel may do before it waits, and bits of it, as early.py has them.
extern u32 word;
const u32 APART = 1u << 30, BEHIND_ONE = 1u << 29;

int block();
char* memory();
void fail(const char* message);
// Wait until `count` threads have come to the barrier of a number.
void meet(u32 number, int count);
void meet_block();
void meet_warp();
// Runs one block, or those of a cluster; what is wrong, or null.
const char* run(int count, void (*f)(), int blocks = 1);
// Four 8x8 matrices of 16-bit elements: lane 8 * i + j points at row j of matrix i.
void matrices(u32* r, u32 a, bool transposed);
// mma.m16n8k16; see "Matrix Fragments for mma.m16n8k16" of the PTX ISA.
template <class T> void step(float* c, const u32* a, u32 b0, u32 b1);

// A tensor map, where its array may be read now: nobody writes it, or earlier grids are complete.
template <class M> const M* may_read(const M* map, bool early) {
  if (!early && !waited[threadIdx.x]) fail("an operand was copied before earlier grids were complete");
  return map; }
// Weights, where nobody writes them.
vec16 read_early(bool early, const void* p, bool ok);
}  // namespace emulator

// One thread runs at a time.
template <class T, class V> T atomicAdd(T* p, V v) { T old = *p; *p = old + v; return old; }
template <class T, class V> T atomicMax(T* p, V v) { T old = *p; *p = old > v ? old : v; return old; }
template <class T, class V> T atomicMin(T* p, V v) { T old = *p; *p = old < v ? old : v; return old; }

template <class T> T atomicCAS(T* p, T was, T v) { T old = *p; if (old == was) *p = v; return old; }
DEV void __threadfence_system() {}

#define __syncthreads() emulator::meet_block()
#define __trap() emulator::fail("trap")

// -- numbers -----------------------------------------------------------------------------------

template <class T, class F> T bits_of(F v) { T r; std::memcpy(&r, &v, sizeof r); return r; }
DEV float __uint_as_float(u32 v) { return bits_of<float>(v); }
DEV float __int_as_float(int v) { return bits_of<float>(v); }
DEV u32 __float_as_uint(float v) { return bits_of<u32>(v); }
DEV int __float_as_int(float v) { return bits_of<int>(v); }
DEV u32 __umulhi(u32 a, u32 b) { return (u64)a * b >> 32; }
DEV float __fmul_rn(float a, float b) { volatile float r = a * b; return r; }
DEV float __fadd_rn(float a, float b) { volatile float r = a + b; return r; }
DEV float __fdiv_rn(float a, float b) { volatile float r = a / b; return r; }
DEV float __fsqrt_rn(float a) { return std::sqrt(a); }
DEV float rsqrtf(float v) { return 1.0f / std::sqrt(v); }

DEV float f32_of(float v) { return v; }
DEV float f32_of(bf16 v) { return __uint_as_float((u32)v.x << 16); }
DEV float f32_of(f16 v) {
  const u32 m = v.x & 0x7fff;
  // The bits of a float whose exponent is less by 112; the product is exact.
  const float r = m < 0x7c00 ? __uint_as_float(m << 13) * 0x1p112f : m > 0x7c00 ? NAN : INFINITY;
  return v.x >> 15 ? -r : r; }
template <class T> struct to;
template <> struct to<float> { DEV float from(float v) { return v; } };
template <> struct to<bf16> { static bf16 from(float v); };
template <> struct to<f16> { static f16 from(float v); };
DEV u32 pack(bf16 a, bf16 b) { return (u32)a.x | ((u32)b.x << 16); }
DEV u32 pack(f16 a, f16 b) { return (u32)a.x | ((u32)b.x << 16); }

DEV float quotient(float a, float b) { return a / b; }
DEV float op_minimum(float a, float b) { return a != a || b != b ? NAN : std::fmin(a, b); }
DEV float op_maximum(float a, float b) { return a != a || b != b ? NAN : std::fmax(a, b); }
template <class T> struct cut { DEV T from(float v) {
  const double low = (T)-1 < 0 ? -std::ldexp(1.0, 8 * sizeof(T) - 1) : 0;
  const double high = std::ldexp(1.0, 8 * sizeof(T) - ((T)-1 < 0));
  if (v != v) return 0;
  if (v <= low) return (T)low;
  if (v >= high) return (T)-1 < 0 ? (T)(((u64)1 << (8 * sizeof(T) - 1)) - 1) : (T)-1;
  return (T)v; } };

// -- what a warp does together -----------------------------------------------------------------

template <class T> DEV T shuffle_xor(T v, int mask) {
  using namespace emulator;
  std::memcpy(slots[threadIdx.x], &v, sizeof v);
  meet_warp();
  T r; std::memcpy(&r, slots[threadIdx.x ^ mask], sizeof r);
  meet_warp();
  return r; }
template <class T> DEV T load(const T* p) { return *p; }
DEV vec16 load16(const void* p) { vec16 v; std::memcpy(&v, p, 16); return v; }
// Where a tile is stored, before its first element is.
namespace emulator {
DEV void may_write() {
  const bool apart = word & APART && blockIdx.x != 0;
  if (!waited[threadIdx.x] && !apart) fail("memory was written before earlier grids were complete"); }
}
DEV void store16(void* p, vec16 v) { emulator::may_write(); std::memcpy(p, &v, 16); }
DEV vec16 load16_stream(const void* p) { return load16(p); }
DEV vec16 load16(const void* p, bool ok, vec16 v) { return ok ? load16(p) : v; }
DEV void later_grids_may_start() {
  const bool keeps = emulator::word & emulator::BEHIND_ONE && blockIdx.x == 0;
  if (!emulator::waited[threadIdx.x] && keeps)
    emulator::fail("later grids may start before all but this one are complete"); }
DEV void bring_soon(const void* p, u32 n) {
  if ((size_t)p % 16 || n % 16) emulator::fail("the second-level cache cannot bring this");
  for (u32 i = 0; i < n; ++i) (void)((const volatile char*)p)[i]; }
DEV void wait_for_earlier_grids() { emulator::waited[threadIdx.x] = true; }
template <class T> DEV void behind(T*&) {}
DEV u32 shared_address(const void* p) { return (u32)((const char*)p - smem); }
DEV void copy_async16(u32 dst, const void* src, bool valid) {
  if (valid) std::memcpy(smem + dst, src, 16); else std::memset(smem + dst, 0, 16); }
DEV void copy_commit() {}
template <int N> DEV void copy_wait() {}
DEV void ldmatrix4(u32* r, u32 a) { emulator::matrices(r, a, false); }
DEV void ldmatrix4_t(u32* r, u32 a) { emulator::matrices(r, a, true); }
DEV void mma_step(float* c, const u32* a, u32 b0, u32 b1, bf16) { emulator::step<bf16>(c, a, b0, b1); }
DEV void mma_step(float* c, const u32* a, u32 b0, u32 b1, f16) { emulator::step<f16>(c, a, b0, b1); }
