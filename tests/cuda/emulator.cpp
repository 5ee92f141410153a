#include "device.cuh"

#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define EMULATOR_ASAN 1
#endif

namespace emulator {
namespace {

// ---- fibers ----

#if defined(__x86_64__)
// Saves what a call must preserve on this stack, remembers it in *from, goes on where `to` stopped.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");
#elif defined(__aarch64__)
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulator_switch, .-emulator_switch
)");
#else
#error "the emulator switches fibers on x86-64 and 64-bit Arm only"
#endif

constexpr int64_t kStack = 256 << 10;
constexpr int kMaxThreads = 1024;

enum class State { kReady, kInCollective, kAtBarrier, kDone };

struct Copy {
  void* shared;
  const void* global;
  bool valid;
};

struct Fiber {
  char* stack = nullptr;
  void* at = nullptr;
  State state = State::kDone;
  Collective function = nullptr;
  dim3 thread;
  std::vector<std::vector<Copy>> groups;  // committed, the oldest first
  std::vector<Copy> open;
};

class Block {
 public:
  Block() {
    // One mapping, given back when the thread ends; pages that no stack touches cost nothing.
    stacks_ = map(kStack * kMaxThreads);
    for (int i = 0; i < kMaxThreads; ++i) fibers_[i].stack = stacks_ + i * kStack;
  }
  ~Block() {
    munmap(stacks_, kStack * kMaxThreads);
    release_shared();
  }

  void begin(const std::function<void()>& kernel, dim3 grid, int threads, int64_t shared_bytes) {
    kernel_ = &kernel;
    threads_ = threads;
    random_ = settings().seed * 0x9e3779b97f4a7c15u + 1;
    place_.grid = grid;
    place_.threads = dim3(threads);
    reserve_shared(shared_bytes);
  }

  void run(dim3 block) {
    place_.block = block;
    std::memset(shared_, 0xff, shared_bytes_);  // NaN, and indices that are out of range
    for (int i = 0; i < threads_; ++i) start(fibers_[i], i);
    while (step()) {
    }
  }

  Fiber& current() { return *current_; }
  Exchange& exchange() { return exchanges_[current_ - fibers_]; }
  const Place& place() const { return place_; }
  char* shared() const { return shared_; }
  int64_t shared_bytes() const { return shared_bytes_; }
  uint64_t random() {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    return random_;
  }

  void wait(State state) {
    current_->state = state;
    switch_to_scheduler(false);
  }

  static void entry();

 private:
  static char* map(int64_t bytes) {
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<char*>(memory);
  }

  void reserve_shared(int64_t bytes) {
    if (bytes % 16) fail("shared memory whose size is not a multiple of 16");
    if (shared_mapping_ && bytes == shared_bytes_) return;
    release_shared();
    const int64_t page = sysconf(_SC_PAGESIZE), usable = (bytes + page - 1) / page * page;
    shared_mapped_ = usable + page;
    shared_mapping_ = map(shared_mapped_);
    if (mprotect(shared_mapping_ + usable, page, PROT_NONE) != 0) throw std::bad_alloc();
    shared_ = shared_mapping_ + usable - bytes;
    shared_bytes_ = bytes;
  }
  void release_shared() {
    if (shared_mapping_) munmap(shared_mapping_, shared_mapped_);
    shared_mapping_ = nullptr;
  }

  void start(Fiber& fiber, int number) {
    fiber.thread = dim3(number, 0, 0);
    fiber.state = State::kReady;
    fiber.groups.clear();
    fiber.open.clear();
    // A stack as emulator_switch leaves one: registers below the address to return to.
    char* top = fiber.stack + kStack - 64;
    top -= reinterpret_cast<uintptr_t>(top) % 16;
    void* const function = reinterpret_cast<void*>(&Block::entry);
#if defined(__x86_64__)
    // At a function's first instruction the stack is 8 bytes off a multiple of 16.
    void** const frame = reinterpret_cast<void**>(top) - 8;
    std::fill(frame, frame + 8, nullptr);
    frame[6] = function;
    fiber.at = frame;
#else
    void** const frame = reinterpret_cast<void**>(top) - 20;
    std::fill(frame, frame + 20, nullptr);
    frame[11] = function;  // x30
    fiber.at = frame;
#endif
  }

  // Runs one warp, or all of them, as far as they go; false when every thread is done.
  bool step() {
    const int warps = (threads_ + 31) / 32;
    bool moved = false;
    switch (settings().order) {
      case Order::kForward:
        for (int w = 0; w < warps; ++w) moved |= run_warp(w);
        break;
      case Order::kBackward:
        for (int w = warps; w-- > 0;) moved |= run_warp(w);
        break;
      case Order::kRandom:
        for (int w = 0; w < warps; ++w)
          if (random() % 2) moved |= run_warp(w);
        if (!moved)
          for (int w = 0; w < warps; ++w) moved |= run_warp(w);
        break;
      case Order::kOneWarpAtATime: {
        const int first = static_cast<int>(random() % warps);
        for (int i = 0; i < warps && !moved; ++i)
          while (run_warp((first + i) % warps)) moved = true;
        break;
      }
    }
    if (moved) return true;
    int done = 0, at_barrier = 0;
    for (int i = 0; i < threads_; ++i) {
      done += fibers_[i].state == State::kDone;
      at_barrier += fibers_[i].state == State::kAtBarrier;
    }
    if (done == threads_) return false;
    if (at_barrier != threads_) fail("not all threads of a block come to __syncthreads");
    for (int i = 0; i < threads_; ++i) fibers_[i].state = State::kReady;
    return true;
  }

  // Whether any of its threads ran.
  bool run_warp(int warp) {
    const int first = warp * 32, last = std::min(threads_, first + 32);
    const bool backward = settings().order == Order::kBackward;
    bool moved = false;
    for (int i = first; i < last; ++i) {
      Fiber& fiber = fibers_[backward ? first + last - 1 - i : i];
      if (fiber.state != State::kReady) continue;
      moved = true;
      switch_to(fiber);
    }
    if (!moved) return false;
    int waiting = 0;
    for (int i = first; i < last; ++i) waiting += fibers_[i].state == State::kInCollective;
    if (waiting == 0) return true;
    for (int i = first; i < last; ++i)
      if (fibers_[i].state != State::kInCollective ||
          fibers_[i].function != fibers_[first].function)
        fail("the lanes of a warp stand at different functions");
    if (last - first != 32) fail("a function of the whole warp in a warp that is not whole");
    fibers_[first].function(exchanges_ + first);
    for (int i = first; i < last; ++i) fibers_[i].state = State::kReady;
    return true;
  }

  void switch_to(Fiber& fiber) {
    current_ = &fiber;
    place_.thread = fiber.thread;
#ifdef EMULATOR_ASAN
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.stack, kStack);
    emulator_switch(&scheduler_, fiber.at);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    emulator_switch(&scheduler_, fiber.at);
#endif
  }

  void switch_to_scheduler([[maybe_unused]] bool for_good) {
#ifdef EMULATOR_ASAN
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, scheduler_stack_, scheduler_size_);
    emulator_switch(&current_->at, scheduler_);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    emulator_switch(&current_->at, scheduler_);
#endif
  }

  Fiber fibers_[kMaxThreads];
  Exchange exchanges_[kMaxThreads];
  Fiber* current_ = nullptr;
  void* scheduler_ = nullptr;
  const std::function<void()>* kernel_ = nullptr;
  int threads_ = 0;
  Place place_;
  uint64_t random_ = 1;
  char* stacks_;
  char *shared_mapping_ = nullptr, *shared_ = nullptr;
  int64_t shared_mapped_ = 0, shared_bytes_ = 0;
#ifdef EMULATOR_ASAN
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_size_ = 0;
#endif
};

Block& block() {
  thread_local std::unique_ptr<Block> instance = std::make_unique<Block>();
  return *instance;
}

void Block::entry() {
  Block& self = block();
#ifdef EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &self.scheduler_stack_, &self.scheduler_size_);
#endif
  (*self.kernel_)();
  self.current_->state = State::kDone;
  self.switch_to_scheduler(true);
  fail("a thread ran on after its end");
}

void land(const Copy& copy) {
  if (copy.valid)
    std::memcpy(copy.shared, copy.global, 16);
  else
    std::memset(copy.shared, 0, 16);
}

void check_shared(const void* address, const char* what) {
  const char* const p = static_cast<const char*>(address);
  const Block& b = block();
  if (p < b.shared() || p + 16 > b.shared() + b.shared_bytes() ||
      reinterpret_cast<uintptr_t>(p) % 16 != 0)
    fail(what);
}

float element(const Exchange& lane, int word, int half, bool float16) {
  const uint16_t bits = static_cast<uint16_t>(lane.in[word] >> 16 * half);
  return float16 ? static_cast<float>(value_of_half(bits)) : float_of(uint32_t{bits} << 16);
}

void multiply_add(Exchange* lanes, bool float16) {
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i)
      for (int half = 0; half < 2; ++half)
        a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + half] = element(lanes[lane], i, half, float16);
    for (int i = 0; i < 2; ++i)
      for (int half = 0; half < 2; ++half)
        b[2 * t + 8 * i + half][g] = element(lanes[lane], 4 + i, half, float16);
    for (int i = 0; i < 4; ++i) c[g + 8 * (i / 2)][2 * t + i % 2] = float_of(lanes[lane].in[8 + i]);
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      lanes[lane].out[i] = bits_of(c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2]);
}

void load_matrices(Exchange* lanes, bool transposed) {
  uint16_t matrices[4][8][8];
  for (int lane = 0; lane < 32; ++lane) {
    const void* row;
    std::memcpy(&row, &lanes[lane].in[0], sizeof row);
    check_shared(row, "a matrix row outside of shared memory or not at a multiple of 16 bytes");
    std::memcpy(matrices[lane / 8][lane % 8], row, 16);
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int major = lane / 4, minor = 2 * (lane % 4);
      const auto& m = matrices[i];
      const uint32_t low = transposed ? m[minor][major] : m[major][minor];
      const uint32_t high = transposed ? m[minor + 1][major] : m[major][minor + 1];
      lanes[lane].out[i] = low | high << 16;
    }
}

}  // namespace

Settings& settings() {
  static Settings instance;
  return instance;
}

const Place& place() { return block().place(); }
char* shared_memory() { return block().shared(); }

void fail(const char* what) {
  const Place& p = block().place();
  std::fprintf(stderr, "emulator: %s (block %u %u %u, thread %u)\n", what, p.block.x, p.block.y,
               p.block.z, p.thread.x);
  std::abort();
}

Exchange& collect(Collective function, const std::array<uint32_t, 16>& in) {
  Block& b = block();
  Exchange& mine = b.exchange();
  mine.in = in;
  b.current().function = function;
  b.wait(State::kInCollective);
  return mine;
}

void sync_threads() { block().wait(State::kAtBarrier); }

void copy_async(void* shared, const void* global, bool valid) {
  check_shared(shared, "a copy outside of shared memory or not to a multiple of 16 bytes");
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0)
    fail("a copy from an address that is not a multiple of 16");
  const Copies when = settings().copies;
  const Copy copy{shared, global, valid};
  if (when == Copies::kEager || (when == Copies::kRandom && block().random() % 2))
    land(copy);
  else
    block().current().open.push_back(copy);
}

void commit_copies() {
  Fiber& fiber = block().current();
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}

void wait_for_copies(int pending) {
  std::vector<std::vector<Copy>>& groups = block().current().groups;
  while (groups.size() > static_cast<size_t>(pending)) {
    for (const Copy& copy : groups.front()) land(copy);
    groups.erase(groups.begin());
  }
}

void run(const std::function<void()>& kernel, dim3 grid, int threads, int64_t shared_bytes) {
  Block& b = block();
  b.begin(kernel, grid, threads, shared_bytes);
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) b.run(dim3(x, y, z));
}

void shuffle(Exchange* lanes) {
  for (int lane = 0; lane < 32; ++lane) lanes[lane].out[0] = lanes[lanes[lane].in[1]].in[0];
}

void ballot(Exchange* lanes) {
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= (lanes[lane].in[0] & 1u) << lane;
  for (int lane = 0; lane < 32; ++lane) lanes[lane].out[0] = bits;
}

void meet(Exchange*) {}

void multiply_add_float16(Exchange* lanes) { multiply_add(lanes, true); }
void multiply_add_bfloat16(Exchange* lanes) { multiply_add(lanes, false); }
void load_matrices(Exchange* lanes) { load_matrices(lanes, false); }
void load_matrices_transposed(Exchange* lanes) { load_matrices(lanes, true); }

}  // namespace emulator

extern "C" {

int32_t dustin_cuda_emulated(void) { return 1; }

void emulator_configure(int32_t order, int32_t copies, uint64_t seed, int64_t shared_memory) {
  emulator::Settings& settings = emulator::settings();
  settings.order = static_cast<emulator::Order>(order);
  settings.copies = static_cast<emulator::Copies>(copies);
  settings.seed = seed;
  settings.shared_memory = shared_memory;
}
}
