// The CUDA backend while somebody captures a graph, and where a driver does not answer as it should.
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/cuda_backend.h"
#include "pretend_gpu.h"
#include "random.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

struct Fixture {
  Fixture() {
    gpu::reset();
    allocation_stream = gpu::make_stream();
    consumer = gpu::make_stream();
  }
  ~Fixture() {
    backend.reset();
    gpu::destroy_stream(allocation_stream);
    gpu::destroy_stream(consumer);
    for (const std::string& what : gpu::violations()) fail(__FILE__, __LINE__, what);
    EXPECT_EQ(gpu::counts().events, 0u);
    EXPECT_EQ(gpu::counts().streams, 0u);
  }

  Backend& make() {
    CudaOptions options;
    options.cast = &gpu::cast;
    options.staging_bytes = 1u << 20;
    options.staging_buffers = 2;
    options.warn = [this](const std::string& message) { warnings.push_back(message); };
    options.allocate = [this](std::size_t bytes) {
      return StreamMemory{gpu::allocate(bytes), reinterpret_cast<Stream>(allocation_stream)};
    };
    backend = make_cuda_backend(std::move(options));
    return *backend;
  }
  Stream stream() const { return reinterpret_cast<Stream>(consumer); }

  /// Holds the consumer's stream back until `open`.
  void hold() {
    gpu::enqueue(consumer, [this] {
      while (!open) std::this_thread::yield();
    });
  }

  cudaStream_t allocation_stream = nullptr, consumer = nullptr;
  std::unique_ptr<Backend> backend;
  std::vector<std::string> warnings;
  std::atomic<bool> open{false};
};

SourcePtr source_of(const std::vector<std::byte>& bytes, Scalar stored, Scalar wanted) {
  auto source = std::make_shared<Source>();
  source->name = "a.weight";
  source->stored = stored;
  source->wanted = wanted;
  source->count = bytes.size() / scalar_size(stored);
  source->address = bytes.data();
  return source;
}

CopyRequest whole(const SourcePtr& source, std::byte* dst, std::vector<EventPtr> after = {}) {
  CopyRequest request;
  request.steps.push_back({std::move(after), {{source, 0, source->count, dst}}});
  return request;
}

}  // namespace

TEST(an_event_that_cannot_be_asked_is_not_over) {
  Fixture fixture;
  Backend& backend = fixture.make();
  fixture.hold();
  const EventPtr event = backend.record(fixture.stream());
  for (const cudaError_t error : {cudaErrorInvalidValue, cudaErrorInvalidResourceHandle,
                                  cudaErrorStreamCaptureUnsupported, cudaErrorUnknown}) {
    gpu::faults().query_error = error;
    EXPECT(!event->done());
  }
  gpu::faults().query_error = 0;
  EXPECT(!event->done());
  fixture.open = true;
  gpu::finish(fixture.consumer);
  EXPECT(event->done());
}

TEST(an_error_that_ends_all_work_ends_what_an_event_stands_for) {
  for (const int error : {226, 700, 721, 810, 911}) {
    Fixture fixture;
    Backend& backend = fixture.make();
    fixture.hold();
    const EventPtr event = backend.record(fixture.stream());
    gpu::faults().query_error = error;
    EXPECT(event->done());
    fixture.open = true;
  }
}

TEST(the_host_waits_where_a_captured_stream_cannot) {
  Fixture fixture;
  Backend& backend = fixture.make();
  const std::vector<std::byte> bytes = random_bytes(1000, 7);
  const gpu::Block device(bytes.size());
  const EventPtr copied = backend.copy(whole(source_of(bytes, Scalar::raw8, Scalar::raw8), device.data()));
  EXPECT(!backend.capturing(fixture.stream()));
  gpu::capture(fixture.consumer, true);
  EXPECT(backend.capturing(fixture.stream()));
  backend.wait(fixture.stream(), copied);  // a wait of the stream's would be a violation
  EXPECT(device == bytes);
  gpu::capture(fixture.consumer, false);
}

TEST(memory_is_released_in_the_order_of_its_readers) {
  Fixture fixture;
  Backend& backend = fixture.make();
  const Memory memory = backend.allocate(512);
  fixture.hold();
  const EventPtr read = backend.record(fixture.stream());
  EXPECT(backend.release_after(memory, {nullptr, read}));
  std::atomic<bool> reused{false};
  gpu::enqueue(fixture.allocation_stream, [&] { reused = true; });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT(!reused);
  fixture.open = true;
  gpu::finish(fixture.allocation_stream);
  EXPECT(reused);
  gpu::capture(fixture.allocation_stream, true);
  EXPECT(!backend.release_after(memory, {backend.record(fixture.stream())}));
  gpu::capture(fixture.allocation_stream, false);
}

TEST(without_kernels_the_readers_cast) {
  for (const Scalar wanted : {Scalar::bf16, Scalar::f64}) {
    Fixture fixture;
    gpu::faults().kernel_error = cudaErrorNoKernelImageForDevice;
    Backend& backend = fixture.make();
    EXPECT_EQ(fixture.warnings.size(), 0u);
    const std::vector<std::byte> bytes = random_bytes(4096, 7);
    const SourcePtr source = source_of(bytes, Scalar::f32, wanted);
    const gpu::Block device(source->wanted_bytes());
    std::vector<std::byte> expected(source->wanted_bytes());
    gpu::cast(expected.data(), wanted, bytes.data(), Scalar::f32, source->count);
    for (int i = 0; i < 2; ++i) {
      backend.wait(fixture.stream(), backend.copy(whole(source, device.data())));
      gpu::finish(fixture.consumer);
      EXPECT(device == expected);
    }
    EXPECT_EQ(gpu::counts().kernels, 0u);
    EXPECT_EQ(fixture.warnings.size(), 1u);
  }
}
