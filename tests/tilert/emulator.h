// Stands in for the device prelude where generated kernels are compiled as C++ for the host: the
// threads of a block are fibers that run in turn, in another order between any two barriers, so
// that a missing barrier shows. What a warp does together is done at barriers of the warp.
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <ucontext.h>
#include <vector>

using std::max;
using std::min;
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

static struct { int x; } threadIdx, blockIdx, gridDim;
alignas(1024) char smem[1 << 21];

// Kernels are compiled as they are written, which takes the least time; this runs often.
#pragma GCC push_options
#pragma GCC optimize("O2")

// -- fibers ------------------------------------------------------------------------------------

namespace emulator {
const int MOST = 2048, BLOCKS = 8;
const u32 SPACE = 1 << 18;  // of shared memory, from one block of a cluster to the next
const size_t STACK = 1 << 18;
enum State { READY, AT_BARRIER, AT_PHASE, DONE };
ucontext_t scheduler, fibers[MOST];
State state[MOST];
u32 place[MOST], parity[MOST];
struct Meeting { int arrived, count; } meetings[16 * BLOCKS + MOST / 32];
const char* wrong;
int threads, block_threads;
u32 seed;
u64 slots[MOST][8];
bool waited[MOST];
void (*body)();

int block() { return threadIdx.x / block_threads; }
char* memory() { return smem + block() * SPACE; }

u32 draw() { return (seed = seed * 1664525u + 1013904223u) >> 8; }
void enter() { body(); state[threadIdx.x] = DONE; swapcontext(&fibers[threadIdx.x], &scheduler); }
void leave() {
  const int me = threadIdx.x;
  swapcontext(&fibers[me], &scheduler);
  threadIdx.x = me;
}
void fail(const char* message) { wrong = message; leave(); }

// Wait until `count` threads have come to the barrier of a number.
void meet(u32 number, int count) {
  if (number < 16) number += 16 * block();
  const int me = threadIdx.x;
  Meeting& meeting = meetings[number];
  if (meeting.arrived && meeting.count != count) fail("threads disagree on who meets at a barrier");
  meeting.count = count;
  state[me] = AT_BARRIER;
  place[me] = number;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    for (int t = 0; t < threads; ++t)
      if (state[t] == AT_BARRIER && place[t] == number) state[t] = READY;
  }
  leave();
}
// A tensor map, where its array may be read now: nobody writes it, or earlier grids are complete.
template <class M> const M* may_read(const M* map, bool early) {
  if (!early && !waited[threadIdx.x]) fail("an operand was copied before earlier grids were complete");
  return map; }
// Weights, where nobody writes them.
vec16 read_early(bool early, const void* p, bool ok) {
  if (!early && !waited[threadIdx.x]) fail("weights were read before earlier grids were complete");
  vec16 v = {};
  if (ok) std::memcpy(&v, p, 16);
  return v; }
void meet_block() { meet(0, block_threads); }
void meet_warp() { meet(16 * BLOCKS + threadIdx.x / 32, 32); }

// What goes on besides threads: nothing here, copies in emulator_hopper.h.
struct Engine {
  virtual void begin_block() {}
  virtual bool phase_ended(u32 barrier, u32 parity) { return true; }
  virtual bool under_way() { return false; }
  virtual void time_passes(bool at_once) {}
};
Engine idle, *engine = &idle;

bool can_run(int t) {
  return state[t] == READY || (state[t] == AT_PHASE && engine->phase_ended(place[t], parity[t]));
}

// Runs one block, or those of a cluster; what is wrong, or null.
const char* run(int count, void (*f)(), int blocks = 1) {
  block_threads = count;
  count *= blocks;
  threads = count;
  body = f;
  wrong = nullptr;
  seed = 12345 + blockIdx.x;
  std::memset(meetings, 0, sizeof meetings);
  engine->begin_block();
  // Of this call alone: every kernel is a library with variables of its own.
  std::unique_ptr<char[]> stacks(new char[STACK * count]);
  for (int t = 0; t < count; ++t) {
    state[t] = READY;
    waited[t] = false;
    getcontext(&fibers[t]);
    fibers[t].uc_stack.ss_sp = &stacks[STACK * t];
    fibers[t].uc_stack.ss_size = STACK;
    fibers[t].uc_link = nullptr;
    makecontext(&fibers[t], enter, 0);
  }
  std::vector<int> order(count);
  for (int t = 0; t < count; ++t) order[t] = t;
  for (;;) {
    for (int i = count - 1; i > 0; --i) std::swap(order[i], order[draw() % (i + 1)]);
    int done = 0;
    bool ran = false;
    for (int t : order) {
      if (can_run(t)) {
        engine->time_passes(false);
        ran = true;
        state[t] = READY;
        threadIdx.x = t;
        swapcontext(&scheduler, &fibers[t]);
        if (wrong) return wrong;
      }
      done += state[t] == DONE;
    }
    if (done == count) return engine->under_way() ? "the block has ended before a copy" : nullptr;
    if (ran) continue;
    if (!engine->under_way())
      return done ? "some threads have ended, others are at a barrier" : "all wait for each other";
    engine->time_passes(true);
  }
}
}  // namespace emulator
#pragma GCC pop_options

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
  const int e = v.x >> 10 & 31, m = v.x & 1023;
  float r = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024.0f + m, e - 25) : std::ldexp((float)m, -24);
  return v.x >> 15 ? -r : r; }
template <class T> struct to;
template <> struct to<float> { DEV float from(float v) { return v; } };
template <> struct to<bf16> { DEV bf16 from(float v) {
  const u32 u = __float_as_uint(v);
  if (v != v) return bf16{0x7fff};
  return bf16{(u16)((u + 0x7fff + (u >> 16 & 1)) >> 16)}; } };
template <> struct to<f16> { DEV f16 from(float v) {
  const u16 sign = std::signbit(v) ? 0x8000 : 0;
  const float a = std::fabs(v);
  if (a != a) return f16{0x7fff};
  if (a >= 65520.0f) return f16{(u16)(sign | 0x7c00)};
  int e; std::frexp(a, &e);
  const int unit = a == 0 ? -24 : std::max(e - 11, -24);
  const int m = (int)std::nearbyint(std::ldexp(a, -unit));
  return f16{(u16)(sign | (unit == -24 ? m : m + ((unit + 24) << 10)))}; } };
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
DEV void store16(void* p, vec16 v) {
  if (!emulator::waited[threadIdx.x])
    emulator::fail("memory was written before earlier grids were complete");
  std::memcpy(p, &v, 16); }
DEV vec16 load16_stream(const void* p) { return load16(p); }
DEV vec16 load16(const void* p, bool ok, vec16 v) { return ok ? load16(p) : v; }
DEV void later_grids_may_start() {}
DEV void wait_for_earlier_grids() { emulator::waited[threadIdx.x] = true; }
template <class T> DEV void behind(T*&) {}
DEV u32 shared_address(const void* p) { return (u32)((const char*)p - smem); }
DEV void copy_async16(u32 dst, const void* src, bool valid) {
  if (valid) std::memcpy(smem + dst, src, 16); else std::memset(smem + dst, 0, 16); }
DEV void copy_commit() {}
template <int N> DEV void copy_wait() {}
// Four 8x8 matrices of 16-bit elements: lane 8 * i + j points at row j of matrix i.
static void matrices(u32* r, u32 a, bool transposed) {
  using namespace emulator;
  slots[threadIdx.x][0] = a;
  meet_warp();
  const int lane = threadIdx.x % 32, warp = threadIdx.x - lane;
  for (int i = 0; i < 4; ++i) {
    u16 pair[2];
    for (int h = 0; h < 2; ++h) {
      const int row = transposed ? lane % 4 * 2 + h : lane / 4;
      const int col = transposed ? lane / 4 : lane % 4 * 2 + h;
      std::memcpy(&pair[h], smem + slots[warp + 8 * i + row][0] + 2 * col, 2);
    }
    r[i] = pair[0] | (u32)pair[1] << 16;
  }
  meet_warp(); }
DEV void ldmatrix4(u32* r, u32 a) { matrices(r, a, false); }
DEV void ldmatrix4_t(u32* r, u32 a) { matrices(r, a, true); }
// mma.m16n8k16; see "Matrix Fragments for mma.m16n8k16" of the PTX ISA.
template <class T> DEV void mma_step(float* c, const u32* a, u32 b0, u32 b1, T) {
  using namespace emulator;
  for (int i = 0; i < 4; ++i) slots[threadIdx.x][i] = a[i];
  slots[threadIdx.x][4] = b0;
  slots[threadIdx.x][5] = b1;
  meet_warp();
  const int lane = threadIdx.x % 32, warp = threadIdx.x - lane;
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + 8 * (e / 2), col = lane % 4 * 2 + e % 2;
    double total = c[e];
    for (int k = 0; k < 16; ++k) {
      const u64* left = slots[warp + row % 8 * 4 + k % 8 / 2];
      const u64* right = slots[warp + col * 4 + k % 8 / 2];
      const T x{(u16)(left[row / 8 + k / 8 * 2] >> 16 * (k % 2))};
      const T y{(u16)(right[4 + k / 8] >> 16 * (k % 2))};
      total += (double)f32_of(x) * f32_of(y);
    }
    c[e] = (float)total;
  }
  meet_warp(); }
