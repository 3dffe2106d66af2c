// What torch asks of a device in C++: devices, streams, events and pinned memory. Python keeps the streams' work.
//
// Built by `build.py` with torch's headers alone.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace {

constexpr auto LATE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;

struct Calls {
  void (*record)(int64_t event, int64_t stream, int device);
  void (*block)(int64_t event, int64_t stream, int device);
  int (*is_over)(int64_t event);
  void (*wait_for)(int64_t event);
  void (*forget)(int64_t event);
  void (*wait_for_stream)(int64_t stream, int device);
  void (*wait_for_device)(int device);
  int (*is_idle)(int64_t stream, int device);
  double (*elapsed_ms)(int64_t first, int64_t second);
  void (*used_on)(const void* memory, int64_t stream, int device);
  int64_t (*allocate)(int64_t bytes, int device, int64_t stream);
  void (*release)(int64_t memory);
};

Calls calls;
std::atomic<int64_t> last_stream{0}, last_event{0};
thread_local int current_device = 0;
thread_local int64_t current_streams[DEVICES] = {0, 0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int of(c10::Device device) {
    return device.index() < 0 ? current_device : device.index();
  }
  static c10::Stream stream(int device, int64_t number) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(LATE, static_cast<c10::DeviceIndex>(device)), number);
  }
  static int64_t number(void* event) {
    return reinterpret_cast<int64_t>(event);
  }

  c10::DeviceType type() const override {
    return LATE;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    current_device = of(device);
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(LATE, static_cast<c10::DeviceIndex>(current_device));
  }
  void setDevice(c10::Device device) const override {
    current_device = of(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = of(device);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(of(device), current_streams[of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(of(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(of(device), ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(of(device), ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream given) const override {
    auto before = getStream(given.device());
    current_streams[of(given.device())] = given.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = reinterpret_cast<void*>(++last_event);
    }
    calls.record(number(*event), on.id(), of(on.device()));
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event != nullptr) {
      calls.block(number(event), on.id(), of(on.device()));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || calls.is_over(number(event)) != 0;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      calls.wait_for(number(event));
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) {
      calls.forget(number(event));
    }
  }
  bool queryStream(const c10::Stream& asked) const override {
    return calls.is_idle(asked.id(), of(asked.device())) != 0;
  }
  void synchronizeStream(const c10::Stream& asked) const override {
    calls.wait_for_stream(asked.id(), of(asked.device()));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    calls.wait_for_device(index < 0 ? current_device : index);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return calls.elapsed_ms(number(first), number(second));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& on) const override {
    calls.used_on(memory.get(), on.id(), of(on.device()));
  }
};

std::mutex pinned_mutex;
std::set<std::pair<uintptr_t, uintptr_t>> pinned;  // first and last byte; never given back

void keep(void*) {}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(64, (bytes / 64 + 1) * 64);
    auto first = reinterpret_cast<uintptr_t>(memory);
    std::lock_guard<std::mutex> locked(pinned_mutex);
    pinned.emplace(first, first + bytes);
    return {memory, memory, &keep, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &keep;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Pinned allocator;

void release(void* memory) {
  calls.release(reinterpret_cast<int64_t>(memory));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current_device = device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    current_device = device;
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* memory) const override {
    auto place = reinterpret_cast<uintptr_t>(memory);
    std::lock_guard<std::mutex> locked(pinned_mutex);
    auto after = pinned.upper_bound({place, UINTPTR_MAX});
    return after != pinned.begin() && place <= std::prev(after)->second;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* whole = storage.unsafeGetStorageImpl();
    auto device = storage.device();
    TORCH_CHECK(bytes == 0 || whole->nbytes() == 0, "only memory that was given back is made again");
    c10::DataPtr fresh(nullptr, device);
    if (bytes > 0) {
      auto place = calls.allocate(static_cast<int64_t>(bytes), device.index(), current_streams[device.index()]);
      auto* memory = reinterpret_cast<void*>(place);
      fresh = c10::DataPtr(memory, memory, &release, device);
    }
    whole->set_data_ptr_noswap(std::move(fresh));
    whole->set_nbytes(bytes);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &allocator;
  }
};

Guard guard;
Hooks hooks;

}  // namespace

extern "C" void late_begin(const Calls* given) {
  calls = *given;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(LATE)].store(&guard);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

extern "C" int64_t late_current_stream(int device) {
  return current_streams[device];
}

extern "C" void late_set_current_stream(int device, int64_t number) {
  current_streams[device] = number;
}

extern "C" int late_current_device() {
  return current_device;
}

extern "C" void late_set_current_device(int device) {
  current_device = device;
}

extern "C" int64_t late_new_stream() {
  return ++last_stream;
}
