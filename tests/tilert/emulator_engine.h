// What emulator.cpp and emulator_hopper.cpp share.
#include "emulator.h"

namespace emulator {
enum State { READY, AT_BARRIER, AT_PHASE, DONE };
extern State state[MOST];
extern u32 place[MOST], parity[MOST];
struct Meeting { int arrived, count; };
extern Meeting meetings[16 * BLOCKS + MOST / 32];

u32 draw();
void leave();

// What goes on besides threads: nothing here, copies in emulator_hopper.h.
struct Engine {
  virtual void begin_block() {}
  virtual bool phase_ended(u32 barrier, u32 parity) { return true; }
  virtual bool under_way() { return false; }
  virtual void time_passes(bool at_once) {}
};
extern Engine* engine;
}  // namespace emulator
