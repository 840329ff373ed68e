// What emulator.h declares.
#include <algorithm>
#include <memory>
#include <setjmp.h>
#include <ucontext.h>
#include <vector>

#include "emulator_engine.h"

Place threadIdx, blockIdx, gridDim;
alignas(1024) char smem[1 << 21];

// -- numbers -----------------------------------------------------------------------------------

bf16 to<bf16>::from(float v) {
  const u32 u = __float_as_uint(v);
  if (v != v) return bf16{0x7fff};
  return bf16{(u16)((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
f16 to<f16>::from(float v) {
  const u16 sign = std::signbit(v) ? 0x8000 : 0;
  const float a = std::fabs(v);
  if (a != a) return f16{0x7fff};
  if (a >= 65520.0f) return f16{(u16)(sign | 0x7c00)};
  int e; std::frexp(a, &e);
  const int unit = a == 0 ? -24 : std::max(e - 11, -24);
  const int m = (int)std::nearbyint(std::ldexp(a, -unit));
  return f16{(u16)(sign | (unit == -24 ? m : m + ((unit + 24) << 10)))};
}

namespace emulator {
// -- fibers ------------------------------------------------------------------------------------

const size_t STACK = 1 << 18;
jmp_buf scheduler, fibers[MOST];
bool started[MOST];
std::unique_ptr<char[]> stacks;
int most;  // threads that there are stacks for
State state[MOST];
u32 place[MOST], parity[MOST];
Meeting meetings[16 * BLOCKS + MOST / 32];
const char* wrong;
int threads, block_threads;
u32 seed;
u64 slots[MOST][8];
bool waited[MOST];
u32 word;
void (*body)();

int block() { return threadIdx.x / block_threads; }
char* memory() { return smem + block() * SPACE; }

u32 draw() { return (seed = seed * 1664525u + 1013904223u) >> 8; }
// Jumps, because swapcontext asks the system for the signal mask each time.
void leave() {
  const int me = threadIdx.x;
  if (!_setjmp(fibers[me])) _longjmp(scheduler, 1);
  threadIdx.x = me;
}
void enter() {
  body();
  state[threadIdx.x] = DONE;
  leave();
}
// Runs a thread until it leaves.
void resume(int t) {
  if (_setjmp(scheduler)) return;
  threadIdx.x = t;
  if (started[t]) _longjmp(fibers[t], 1);
  started[t] = true;
  ucontext_t first;
  getcontext(&first);
  first.uc_stack.ss_sp = &stacks[STACK * t];
  first.uc_stack.ss_size = STACK;
  first.uc_link = nullptr;
  makecontext(&first, enter, 0);
  setcontext(&first);
}
void fail(const char* message) { wrong = message; leave(); }

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
void meet_block() { meet(0, block_threads); }
void meet_warp() { meet(16 * BLOCKS + threadIdx.x / 32, 32); }

Engine idle, *engine = &idle;

bool can_run(int t) {
  return state[t] == READY || (state[t] == AT_PHASE && engine->phase_ended(place[t], parity[t]));
}

const char* run(int count, void (*f)(), int blocks) {
  block_threads = count;
  count *= blocks;
  threads = count;
  body = f;
  wrong = nullptr;
  seed = 12345 + blockIdx.x;
  std::memset(meetings, 0, sizeof meetings);
  engine->begin_block();
  if (count > most) stacks.reset(new char[STACK * (most = count)]);
  for (int t = 0; t < count; ++t) {
    state[t] = READY;
    waited[t] = started[t] = false;
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
        resume(t);
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

// -- what a warp does together -----------------------------------------------------------------

vec16 read_early(bool early, const void* p, bool ok) {
  if (!early && !waited[threadIdx.x]) fail("weights were read before earlier grids were complete");
  vec16 v = {};
  if (ok) std::memcpy(&v, p, 16);
  return v;
}
void matrices(u32* r, u32 a, bool transposed) {
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
  meet_warp();
}
template <class T> void step(float* c, const u32* a, u32 b0, u32 b1) {
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
  meet_warp();
}
template void step<bf16>(float* c, const u32* a, u32 b0, u32 b1);
template void step<f16>(float* c, const u32* a, u32 b0, u32 b1);
}  // namespace emulator
