// The device guard and the generators of the pretend device.
#include "torch_device.h"

#include <ATen/Parallel.h>
#include <ATen/Utils.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>

namespace pretend {

namespace {

thread_local Stream* streams[kDevices]{};

struct Event {
  PointPtr point;
  bool timed = false;
};

}  // namespace

// -------------------------------------------------------------------------------------------- streams

Stream& current_stream(int device) noexcept {
  Stream* const stream = streams[device];
  return stream == nullptr ? default_stream(device) : *stream;
}

Stream& stream_of(const c10::Stream& stream) noexcept {
  if (stream.id() == 0) return default_stream(stream.device_index());
  return *reinterpret_cast<Stream*>(static_cast<std::intptr_t>(stream.id()));
}

c10::Stream as_torch(Stream& stream) noexcept {
  const int device = device_of(stream);
  const bool is_default = &stream == &default_stream(device);
  const auto id = static_cast<c10::StreamId>(reinterpret_cast<std::intptr_t>(&stream));
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), is_default ? 0 : id);
}

c10::Stream stream_from_pool(int device, int priority) {
  TORCH_CHECK(!faults().one_stream, "Backend doesn't support acquiring a stream from pool.");
  if (faults().no_priorities) priority = 0;
  // As torch's: 32 streams of each priority, handed out in turn.
  static std::mutex mutex;
  static std::map<std::pair<int, int>, std::vector<Stream*>> pools;
  static std::size_t next = 0;
  const std::lock_guard lock(mutex);
  auto& pool = pools[{device, priority}];
  if (pool.size() < 32) pool.push_back(&make_stream(device, priority));
  return as_torch(*pool[pool.size() < 32 ? pool.size() - 1 : next++ % 32]);
}

int& sync_debug_mode() noexcept {
  static int mode = 0;
  return mode;
}

void note_synchronisation() {
  if (sync_debug_mode() == 2)
    TORCH_CHECK(false, "called a synchronizing ", c10::DeviceTypeName(kType), " operation");
  if (sync_debug_mode() == 1) TORCH_WARN("called a synchronizing ", c10::DeviceTypeName(kType), " operation");
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static void refuse_in_capture(const char* who) {
    TORCH_CHECK(!capture_forbids(who), "CUDA error: operation not permitted when stream is capturing");
  }
  static int index(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }

  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return device_at(current_device()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    if (device.index() < 0) return;
    TORCH_CHECK(device.index() < kDevices, c10::DeviceTypeName(kType), " error: invalid device ordinal ",
                int(device.index()));
    set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) set_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override { return as_torch(current_stream(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    TORCH_CHECK(!faults().no_default_stream, "Backend doesn't support acquiring a default stream.");
    return as_torch(default_stream(index(device)));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return stream_from_pool(index(device), priority);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return stream_from_pool(index(device), high ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    streams[stream.device_index()] = &stream_of(stream);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return stream.id() == 0 ? nullptr : &stream_of(stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return faults().no_devices ? 0 : kDevices; }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
    static_cast<Event*>(*event)->point = checked([&] { return pretend::record(stream_of(stream)); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr)
      checked([&] { pretend::wait(stream_of(stream), static_cast<Event*>(event)->point); });
  }
  bool queryEvent(void* event) const override {
    refuse_in_capture("Event.query");
    if (const int error = faults().query_error; error != 0) {
      checked([&] { throw DeviceFault(error, "the event cannot be asked"); });
    }
    return event == nullptr || checked([&] { return reached(static_cast<Event*>(event)->point); });
  }
  void synchronizeEvent(void* event) const override {
    refuse_in_capture("Event.synchronize");
    if (event != nullptr)
      checked([&] { synchronise(static_cast<Event*>(event)->point, "Event.synchronize"); });
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const PointPtr& begin = static_cast<Event*>(from)->point;
    const PointPtr& end = static_cast<Event*>(to)->point;
    TORCH_CHECK(begin && end && reached(begin) && reached(end), "both events must be recorded and over");
    return std::chrono::duration<float, std::milli>(time_of(end) - time_of(begin))
        .count();  // as CUDA tells it
  }
  bool queryStream(const c10::Stream& stream) const override {
    refuse_in_capture("Stream.query");
    return checked([&] { return idle(stream_of(stream)); });
  }
  bool isStreamCapturing(const c10::Stream& stream) const override { return capturing(stream_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    checked([&] { synchronise(stream_of(stream), "Stream.synchronize"); });
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    checked([&] { synchronise_device(device < 0 ? current_device() : device, "synchronize"); });
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator().recordStream(data, stream);
  }
};

const c10::impl::DeviceGuardImplRegistrar registered_guard(kType, new Guard);

}  // namespace

// ----------------------------------------------------------------------------------------- generators

namespace {

struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(kKey)) {}
  void set_current_seed(std::uint64_t value) override {
    seed_ = value;
    offset_ = 0;
  }
  void set_offset(std::uint64_t value) override { offset_ = value; }
  std::uint64_t get_offset() const override { return offset_; }
  std::uint64_t current_seed() const override { return seed_; }
  std::uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::Tensor state = at::empty({16}, at::TensorOptions().dtype(at::kByte));
    std::memcpy(state.data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::GeneratorImpl* clone_impl() const override {
    auto* const other = new GeneratorImpl(device_.index());
    other->seed_ = seed_;
    other->offset_ = offset_;
    return other;
  }
  std::uint64_t next() {
    const std::lock_guard lock(mutex_);
    offset_ += 4;
    return (seed_ ^ (offset_ * 0x9E3779B97F4A7C15ull)) * 0xBF58476D1CE4E5B9ull;
  }
  std::uint64_t seed_ = 0, offset_ = 0;
};

}  // namespace

at::Generator new_generator(int device) {
  return at::make_generator<GeneratorImpl>(static_cast<c10::DeviceIndex>(device));
}

const at::Generator& default_generator(int device) {
  static const auto* const all = new std::vector<at::Generator>{new_generator(0), new_generator(1)};
  return (*all)[device < 0 ? current_device() : device];
}

at::Generator draw(const std::optional<at::Generator>& generator, int device) {
  const at::Generator& from = generator && generator->defined() ? *generator : default_generator(device);
  TORCH_CHECK(from.device().type() == kType, "Expected a '", c10::DeviceTypeName(kType, /*lower_case=*/true),
              "' device type for generator but found 'cpu'");
  at::Generator drawn = at::detail::createCPUGenerator();
  drawn.set_current_seed(static_cast<GeneratorImpl*>(from.unsafeGetGeneratorImpl())->next());
  return drawn;
}

namespace {

const bool set_up_thread = [] {
  set_thread_setup([] { at::set_num_threads(1); });
  return true;
}();

}  // namespace

}  // namespace pretend
