// What emulator_hopper.h declares.
#include <algorithm>
#include <functional>
#include <map>
#include <vector>

#include "emulator_engine.h"
#include "emulator_hopper.h"

namespace emulator {
const u64 LIVE = 0x5ca1ab1e0ddba11ull;
struct Phases { int arrivals, pending; i64 bytes; u32 number; };
std::map<u32, Phases> barriers;

Phases& barrier_at(u32 at) {
  u64 word;
  std::memcpy(&word, smem + at, 8);
  if (!barriers.count(at) || word != (LIVE ^ at)) fail("no barrier is there, or it was overwritten");
  return barriers[at];
}
void turn(Phases& p) {
  if (p.pending || p.bytes) return;
  p.pending = p.arrivals;
  ++p.number;
}

// -- copies ------------------------------------------------------------------------------------

struct Map { const char* from; int axes, size; i64 dims[5], strides[5], box[5]; };
struct Part { Map map; u32 to, barrier; i64 first[5]; int row, end, wait; };
std::vector<Part> parts;

Map decoded(const tensor_map* packed) {
  const u64* w = packed->w;
  Map m{(const char*)w[0], (int)(w[1] & 255), (int)(w[1] >> 8), {}, {}, {}};
  for (int i = 0; i < m.axes; ++i) {
    m.dims[i] = w[2 + i];
    m.strides[i] = i ? w[6 + i] : m.size;
    m.box[i] = w[11 + i];
  }
  return m;
}
// Turns until a part lands: now and then many, or as many as a thread takes for a step.
int delay() {
  const u32 kind = draw() % 16;
  return (int)(draw() % (3 * threads)) << (kind > 2 ? 0 : kind ? 4 : 8); }
u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }
int rows_of(const Map& m) { int n = 1; for (int i = 1; i < m.axes; ++i) n *= m.box[i]; return n; }

void land(const Part& p) {
  const Map& m = p.map;
  for (int row = p.row; row < p.end; ++row) {
    i64 offset = 0, rest = row;
    bool inside = true;
    for (int i = 1; i < m.axes; ++i) {
      const i64 at = p.first[i] + rest % m.box[i];
      rest /= m.box[i];
      inside &= 0 <= at && at < m.dims[i];
      offset += at * m.strides[i];
    }
    for (int c = 0; c < m.box[0]; ++c) {
      const i64 at = p.first[0] + c;
      char* to = smem + swizzled(p.to + row * 128 + c * m.size);
      if (inside && 0 <= at && at < m.dims[0]) std::memcpy(to, m.from + offset + at * m.size, m.size);
      else std::memset(to, 0, m.size);
    }
  }
  Phases& phases = barriers[p.barrier];
  phases.bytes -= (p.end - p.row) * 128;
  turn(phases);
}

void copy(u32 to, const tensor_map* map, u32 barrier, const i64* first, int axes) {
  const Map m = decoded(map);
  if (m.axes != axes) fail("as many coordinates as the tensor map has axes");
  if (m.box[0] * m.size != 128 || to % 1024) fail("a box that is not in the swizzle's place");
  const int rows = rows_of(m), cut = draw() % (rows + 1);
  for (int row = 0; row < rows; ++row) std::memset(smem + to + row * 128, 0xff, 128);
  Part part{m, to, barrier, {}, 0, cut, delay()};
  std::copy(first, first + axes, part.first);
  // A part of no rows would be under way for nothing.
  if (cut > 0) parts.push_back(part);
  part.row = cut;
  part.end = rows;
  part.wait = delay();
  if (cut < rows) parts.push_back(part);
}

// -- sums that blocks of a cluster send each other -----------------------------------------------

struct Sent { u32 to, barrier; u32 words[4]; int wait; };
std::vector<Sent> sending;

void arrive(const Sent& p) {
  bool there = false;
  for (int t = 0; t < threads; ++t) there |= t / block_threads == p.to / SPACE && state[t] != DONE;
  if (!there) fail("a block of the cluster has ended before all came that was sent to it");
  std::memcpy(smem + p.to, p.words, 16);
  Phases& phases = barrier_at(p.barrier);
  phases.bytes -= 16;
  turn(phases);
}

// -- stores ------------------------------------------------------------------------------------

// Rows of a box on their way out: first they are read, and later they are in their place.
struct Leaving { Map map; u32 from; i64 first[5]; int row, end, wait, thread, group; std::vector<char> held; };
std::vector<Leaving> leaving;
struct Written { u32 at; u32 words[4]; };
std::vector<Written> unknown[MOST];  // what a thread has written and the copy engine does not know of
int stored[MOST];                    // boxes that a thread had stored
const u32 STORES = 1u << 30;         // as the place of a thread that waits for those

void read_rows(Leaving& p) {
  for (int row = p.row; row < p.end; ++row)
    for (int c = 0; c < 128; ++c) p.held.push_back(smem[swizzled(p.from + row * 128 + c)]);
}
void put_rows(const Leaving& p) {
  const Map& m = p.map;
  for (int row = p.row; row < p.end; ++row)
    for (int c = 0; c < m.box[0]; ++c) {
      const i64 x = p.first[0] + c, y = p.first[1] + row;
      if (x < 0 || x >= m.dims[0] || y < 0 || y >= m.dims[1]) continue;
      std::memcpy((char*)m.from + y * m.strides[1] + x * m.size,
                  &p.held[(row - p.row) * 128 + c * m.size], m.size);
    }
}
// Whether of the boxes of a thread all but the last few are read, or even in their place.
bool have_left(int thread, int but, bool placed) {
  for (const Leaving& p : leaving)
    if (p.thread == thread && p.group < stored[thread] - but && (placed || p.held.empty())) return false;
  return true;
}
void wait_for_stores(int but, bool placed) {
  const int me = threadIdx.x;
  state[me] = AT_PHASE;
  place[me] = STORES + me;
  parity[me] = but * 2 + placed;
  leave();
}

// -- products ----------------------------------------------------------------------------------

struct Product { float* d; int n; std::function<std::vector<double>()> terms; std::vector<double> issued; };
typedef std::vector<Product> Group;
bool begun[MOST];
Group open[MOST];
std::vector<Group> groups[MOST];
std::map<float*, std::vector<float>> sums[MOST];

template <class T> double element(u64 descriptor, int row, int k) {
  const u32 start = block() * SPACE + ((descriptor & 0x3fff) << 4), eight = (descriptor >> 32 & 0x3fff) << 4;
  T v;
  std::memcpy(&v, smem + swizzled(start + row / 8 * eight + row % 8 * 128 + k * 2), 2);
  return f32_of(v);
}
// What a product adds to this thread's sums: NaN for rows that are not there.
template <class T> std::vector<double> terms(int n, int rows, u64 a, u64 b) {
  std::vector<double> found(n / 2);
  const int lane = threadIdx.x % 32, warp = threadIdx.x % block_threads / 32 % 4;
  double left[2][16];
  for (int h = 0; h < 2; ++h) {
    const int row = warp * 16 + lane / 4 + 8 * h;
    for (int k = 0; k < 16; ++k) left[h][k] = row < rows ? element<T>(a, row, k) : NAN;
  }
  for (int j = 0; j < n / 8; ++j)
    for (int c = 0; c < 2; ++c)
      for (int k = 0; k < 16; ++k) {
        const double right = element<T>(b, j * 8 + lane % 4 * 2 + c, k);
        for (int h = 0; h < 2; ++h) found[j * 4 + h * 2 + c] += left[h][k] * right;
      }
  return found;
}
void begin_product(float* d, int n, bool keep, std::function<std::vector<double>()> terms,
                   std::initializer_list<u64> descriptors) {
  const int me = threadIdx.x;
  if (!begun[me]) fail("a product without wgmma.fence");
  for (u64 x : descriptors)
    if (x >> 62 != 1 || (x >> 49 & 7)) fail("an operand without the swizzle of 128 bytes");
  if (!sums[me].count(d)) sums[me][d].assign(d, d + n / 2);
  if (!keep) sums[me][d].assign(n / 2, 0);
  std::fill(d, d + n / 2, NAN);
  open[me].push_back({d, n, terms, terms()});
}
template <class T> void product(float* d, int n, int rows, u64 a, u64 b) {
  begin_product(d, n, true, [=] { return terms<T>(n, rows, a, b); }, {a, b});
}
template void product<bf16>(float* d, int n, int rows, u64 a, u64 b);
template void product<f16>(float* d, int n, int rows, u64 a, u64 b);
// Of an operand whose rows run along k.
template <class T> double element_across(u64 descriptor, int column, int k) {
  const u32 start = block() * SPACE + ((descriptor & 0x3fff) << 4);
  const u32 beside = (descriptor >> 16 & 0x3fff) << 4, eight = (descriptor >> 32 & 0x3fff) << 4;
  T v;
  const u32 row = k / 8 * eight + k % 8 * 128;
  std::memcpy(&v, smem + swizzled(start + column / 64 * beside + row + column % 64 * 2), 2);
  return f32_of(v);
}
// Four lanes together hold two rows of the left operand.
template <class T> void product_left(float* d, int n, bool across, const u32* a, u64 b, bool keep) {
  const int me = threadIdx.x, quad = me - me % 4, lane = me % 4;
  for (int i = 0; i < 4; ++i) slots[me][i] = a[i];
  meet_warp();
  std::vector<double> left(32);
  for (int h = 0; h < 2; ++h)
    for (int k = 0; k < 16; ++k) {
      const T v{(u16)(slots[quad + k % 8 / 2][h + k / 8 * 2] >> 16 * (k % 2))};
      left[16 * h + k] = f32_of(v);
    }
  const std::vector<u32> held(a, a + 4);
  meet_warp();
  begin_product(d, n, keep, [=] {
    if (!std::equal(held.begin(), held.end(), a)) fail("a register changed while a product read it");
    std::vector<double> found(n / 2);
    for (int j = 0; j < n / 8; ++j)
      for (int c = 0; c < 2; ++c)
        for (int k = 0; k < 16; ++k) {
          const int column = j * 8 + lane * 2 + c;
          const double right = across ? element_across<T>(b, column, k) : element<T>(b, column, k);
          for (int h = 0; h < 2; ++h) found[j * 4 + h * 2 + c] += left[16 * h + k] * right;
        }
    return found;
  }, {b});
}
template void product_left<bf16>(float* d, int n, bool across, const u32* a, u64 b, bool keep);
template void product_left<f16>(float* d, int n, bool across, const u32* a, u64 b, bool keep);
void complete(const Product& p) {
  const int me = threadIdx.x;
  const std::vector<double> now = p.terms();
  if (std::memcmp(now.data(), p.issued.data(), now.size() * sizeof(double)))
    fail("an operand of a product changed while it was read");
  std::vector<float>& total = sums[me][p.d];
  for (int i = 0; i < p.n / 2; ++i) total[i] = (float)(total[i] + now[i]);
  bool last = true;
  for (const Group& g : groups[me]) for (const Product& q : g) last &= q.d != p.d;
  for (const Product& q : open[me]) last &= q.d != p.d;
  if (!last) return;
  std::copy(total.begin(), total.end(), p.d);
  sums[me].erase(p.d);
}

void wait_for_products(int but) {
  std::vector<Group>& mine = groups[threadIdx.x];
  while (mine.size() > but) {
    const Group first = mine[0];
    mine.erase(mine.begin());
    for (size_t i = 0; i < first.size(); ++i) {
      // Those behind it in its group are still under way.
      open[threadIdx.x].insert(open[threadIdx.x].begin(), first.begin() + i + 1, first.end());
      complete(first[i]);
      open[threadIdx.x].erase(open[threadIdx.x].begin(), open[threadIdx.x].begin() + (first.size() - i - 1));
    }
  }
  meet_warp();
}

// The barrier of a cluster: its phases, and the one that each thread has arrived at, or -1.
int cluster_phase, cluster_pending, arrived[MOST];
bool met[MOST];

struct CopyEngine : Engine {
  CopyEngine() { engine = this; }
  void begin_block() override {
    cluster_phase = 0;
    cluster_pending = threads;
    std::fill(arrived, arrived + MOST, -1);
    std::fill(met, met + MOST, false);
    barriers.clear();
    parts.clear();
    sending.clear();
    leaving.clear();
    for (int t = 0; t < threads; ++t) {
      unknown[t].clear();
      stored[t] = 0;
      begun[t] = false;
      open[t].clear();
      groups[t].clear();
      sums[t].clear();
    }
  }
  bool phase_ended(u32 at, u32 parity) override {
    if (at >= STORES) return have_left(at - STORES, parity / 2, parity % 2);
    return (barriers[at].number & 1) != parity; }
  bool under_way() override { return !parts.empty() || !sending.empty() || !leaving.empty(); }
  void time_passes(bool at_once) override {
    for (size_t i = 0; i < parts.size();) {
      if (--parts[i].wait > 0 && !at_once) { ++i; continue; }
      const Part part = parts[i];
      parts.erase(parts.begin() + i);
      land(part);
      if (at_once) return;
    }
    for (size_t i = 0; i < sending.size();) {
      if (--sending[i].wait > 0 && !at_once) { ++i; continue; }
      const Sent sent = sending[i];
      sending.erase(sending.begin() + i);
      arrive(sent);
      if (at_once) return;
    }
    for (size_t i = 0; i < leaving.size();) {
      if (--leaving[i].wait > 0 && !at_once) { ++i; continue; }
      if (leaving[i].held.empty()) {
        read_rows(leaving[i]);
        leaving[i].wait = delay();
      } else {
        put_rows(leaving[i]);
        leaving.erase(leaving.begin() + i);
      }
      if (at_once) return;
    }
  }
} copy_engine;
}  // namespace emulator

using namespace emulator;

void barrier_init(u32 at, u32 arrivals) {
  if (at % 8) fail("a barrier at an odd address");
  barriers[at] = {(int)arrivals, (int)arrivals, 0, 0};
  const u64 word = LIVE ^ at;
  std::memcpy(smem + at, &word, 8);
}
void barriers_ready() {}
void barrier_arrive(u32 at) {
  Phases& p = barrier_at(at);
  if (--p.pending < 0) fail("more arrivals than a barrier counts");
  turn(p);
}
void barrier_arrive_warp(u32 at) {
  meet_warp();
  if (threadIdx.x % 32 == 0) barrier_arrive(at);
}
void barrier_expect(u32 at, u32 bytes) {
  barrier_at(at).bytes += bytes;
  barrier_arrive(at);
}
void barrier_wait(u32 at, u32 parity) {
  barrier_at(at);
  state[threadIdx.x] = AT_PHASE;
  place[threadIdx.x] = at;
  emulator::parity[threadIdx.x] = parity;
  leave();
}
void wgmma_begin() { begun[threadIdx.x] = true; }
void wgmma_commit() {
  const int me = threadIdx.x;
  begun[me] = false;
  groups[me].push_back(open[me]);
  open[me].clear();
}
void store_matrices(u32 at, u32 a, u32 b, u32 c, u32 d) {
  const u32 words[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) slots[threadIdx.x][i] = words[i];
  meet_warp();
  const int lane = threadIdx.x % 32, warp = threadIdx.x - lane;
  Written row{at, {}};
  for (int i = 0; i < 4; ++i) row.words[i] = slots[warp + lane % 8 * 4 + i][lane / 8];
  if (at % 16) fail("a row of a matrix at an odd address");
  // Until the copy engine knows of it, what was there is gone as well.
  std::memset(smem + at, 0xff, 16);
  unknown[threadIdx.x].push_back(row);
  meet_warp();
}
void boxes_filled() {
  for (const Written& row : unknown[threadIdx.x]) std::memcpy(smem + row.at, row.words, 16);
  unknown[threadIdx.x].clear();
}
void store_box(const tensor_map* map, u32 from, int c0, int c1) {
  const Map m = decoded(map);
  if (m.axes != 2 || m.box[0] * m.size != 128 || from % 1024) fail("a box that is not in the swizzle's place");
  const int rows = m.box[1], cut = 1 + draw() % (rows - 1), me = threadIdx.x;
  Leaving part{m, from, {c0, c1}, 0, cut, delay(), me, stored[me]++, {}};
  leaving.push_back(part);
  part.row = cut;
  part.end = rows;
  part.wait = delay();
  leaving.push_back(part);
}
static void pass(u32 number, int count) {
  number += 16 * block();
  Meeting& meeting = meetings[number];
  if (meeting.arrived && meeting.count != count) fail("threads disagree on who meets at a barrier");
  meeting.count = count;
  if (++meeting.arrived < count) return;
  meeting.arrived = 0;
  for (int t = 0; t < threads; ++t)
    if (state[t] == AT_BARRIER && place[t] == number) state[t] = READY;
}
void pass_turn(int group, int threads) { pass(2 + group, threads); }
void come_by(int threads) { pass(15, threads); }
bool any_lane(bool v) {
  slots[threadIdx.x][0] = v;
  meet_warp();
  const int warp = threadIdx.x - threadIdx.x % 32;
  bool any = false;
  for (int i = 0; i < 32; ++i) any |= slots[warp + i][0];
  meet_warp();
  return any;
}
u32 transposed(u32 v) {
  slots[threadIdx.x][0] = v;
  meet_warp();
  const int lane = threadIdx.x % 32, warp = threadIdx.x - lane;
  u32 r = 0;
  for (int h = 0; h < 2; ++h) {
    const int row = lane % 4 * 2 + h, column = lane / 4;
    r |= (u32)(u16)(slots[warp + row * 4 + column / 2][0] >> 16 * (column % 2)) << 16 * h;
  }
  meet_warp();
  return r;
}
void cluster_arrive() {
  if (arrived[threadIdx.x] == cluster_phase) fail("a thread arrives at the barrier of the cluster twice");
  arrived[threadIdx.x] = cluster_phase;
  if (--cluster_pending) return;
  cluster_pending = threads;
  ++cluster_phase;
}
void cluster_wait() {
  const int phase = arrived[threadIdx.x];
  if (phase < 0) fail("a thread waits for the cluster without having arrived");
  while (cluster_phase == phase) leave();
  met[threadIdx.x] = true;
}
void send4(u32 to, const float* v, u32 barrier) {
  if (!met[threadIdx.x]) fail("sums are sent to a block that may not have begun");
  if (to / SPACE != barrier / SPACE || to % 16) fail("sums and their barrier are of one block");
  barrier_at(barrier);
  std::memset(smem + to, 0xff, 16);
  Sent sent{to, barrier, {}, delay()};
  std::memcpy(sent.words, v, 16);
  sending.push_back(sent);
}
