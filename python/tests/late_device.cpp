// A device for tests whose work comes late: its memory is the host's, and each of its streams is a thread that sleeps before
// each copy, so that a missing wait gives old values. `at` runs all other operations on the CPU; what they write is copied too.
//
//     torch.ops.load_library(".../late_device.so"); torch.utils.rename_privateuse1_backend("late")

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto LATE = c10::DeviceType::PrivateUse1;

// A stream: its jobs run one after the other.
struct Queue {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::function<void()>> jobs;
  size_t given = 0, done = 0;

  Queue() {
    std::thread([this] { run(); }).detach();
  }

  void run() {
    for (;;) {
      std::function<void()> job;
      {
        std::unique_lock<std::mutex> held(lock);
        changed.wait(held, [this] { return !jobs.empty(); });
        job = std::move(jobs.front());
        jobs.pop_front();
      }
      job();
      job = nullptr;
      std::lock_guard<std::mutex> held(lock);
      ++done;
      changed.notify_all();
    }
  }

  void add(std::function<void()> job) {
    std::lock_guard<std::mutex> held(lock);
    jobs.push_back(std::move(job));
    ++given;
    changed.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> held(lock);
    const size_t until = given;
    changed.wait(held, [&] { return done >= until; });
  }

  bool is_idle() {
    std::lock_guard<std::mutex> held(lock);
    return done == given;
  }
};

// All streams. Number 0 is the default one.
Queue& queue_of(c10::StreamId id) {
  static std::mutex lock;
  static auto* queues = new std::vector<std::unique_ptr<Queue>>();
  std::lock_guard<std::mutex> held(lock);
  while (queues->size() <= static_cast<size_t>(id)) {
    queues->push_back(std::make_unique<Queue>());
  }
  return *(*queues)[id];
}

thread_local c10::StreamId current = 0;
std::atomic<c10::StreamId> streams{1};

Stream stream_of(c10::StreamId id) {
  return Stream(Stream::UNSAFE, Device(LATE, 0), id);
}

struct Event {
  std::mutex lock;
  std::condition_variable changed;
  size_t given = 0, done = 0;

  void wait(size_t until) {
    std::unique_lock<std::mutex> held(lock);
    changed.wait(held, [&] { return done >= until; });
  }

  size_t last() {
    std::lock_guard<std::mutex> held(lock);
    return given;
  }
};

using Shared = std::shared_ptr<Event>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return LATE; }
  Device exchangeDevice(Device) const override { return Device(LATE, 0); }
  Device getDevice() const override { return Device(LATE, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream_of(current); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getNewStream(Device, int) const override { return stream_of(streams++); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const auto old = current;
    current = stream.id();
    return stream_of(old);
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Shared*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Shared(std::make_shared<Event>());
    }
    Shared shared = *static_cast<Shared*>(*event);
    size_t number;
    {
      std::lock_guard<std::mutex> held(shared->lock);
      number = ++shared->given;
    }
    queue_of(stream.id()).add([shared, number] {
      std::lock_guard<std::mutex> held(shared->lock);
      shared->done = std::max(shared->done, number);
      shared->changed.notify_all();
    });
  }
  void block(void* event, const Stream& stream) const override {
    if (event == nullptr) {
      return;
    }
    Shared shared = *static_cast<Shared*>(event);
    queue_of(stream.id()).add([shared, until = shared->last()] { shared->wait(until); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    Shared shared = *static_cast<Shared*>(event);
    std::lock_guard<std::mutex> held(shared->lock);
    return shared->done == shared->given;
  }
  bool queryStream(const Stream& stream) const override { return queue_of(stream.id()).is_idle(); }
  void synchronizeStream(const Stream& stream) const override { queue_of(stream.id()).wait(); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      Shared shared = *static_cast<Shared*>(event);
      shared->wait(shared->last());
    }
  }
  void synchronizeDevice(const DeviceIndex) const override {
    for (c10::StreamId id = 0; id < streams; ++id) {
      queue_of(id).wait();
    }
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

void give_back(void* memory) {
  std::free(memory);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes > 0 ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    return {memory, memory, &give_back, Device(LATE, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* into, const void* from, std::size_t bytes) const override { default_copy_data(into, from, bytes); }
};

Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    queue_of(current).wait();
    auto made = memory.allocate(bytes);
    std::memcpy(made.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(made));
    storage.set_nbytes(bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

c10::DispatchKeySet keys() {
  return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, keys(), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, keys(), c10::dtype_or_default(dtype));
}

// The memory of a tensor as the CPU sees it.
at::Tensor seen(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).pinned_memory(false).requires_grad(false));
}

std::chrono::microseconds delay() {
  static const char* given = std::getenv("LATE_US");
  return std::chrono::microseconds(given != nullptr ? std::atoi(given) : 2000);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& into, bool non_blocking) {
  // What CPU operations have written is not there any more when it is copied.
  const bool is_kept = non_blocking || !from.is_cpu();
  const at::Tensor source = is_kept ? from : from.clone();
  // The program may change a tensor before the job runs, but not its memory.
  queue_of(current).add([to = seen(into), of = seen(source), kept = std::pair(into.storage(), source.storage())] {
    std::this_thread::sleep_for(delay());
    at::InferenceMode mode;
    to.copy_(of);
  });
  if (into.is_cpu() && !non_blocking) {
    queue_of(current).wait();
  }
  return into;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& into) {
  if (into.sizes() != from.sizes()) {
    into.resize_(from.sizes());
  }
  return copy_from(from, into, false);
}

at::Scalar item(const at::Tensor& tensor) {
  queue_of(current).wait();
  return seen(tensor).item();
}

void record_stream(at::Tensor&, Stream) {}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

} // namespace
