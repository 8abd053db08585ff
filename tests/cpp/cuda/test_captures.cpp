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
#include "fake_cudart.h"
#include "random.h"
#include "temp_file.h"

namespace {

using namespace dynswap;
using namespace dynswap::test;

struct Fixture {
  Fixture() {
    fake_cuda::reset();
    allocation_stream = fake_cuda::make_stream();
    consumer = fake_cuda::make_stream();
  }
  ~Fixture() {
    backend.reset();
    fake_cuda::destroy_stream(allocation_stream);
    fake_cuda::destroy_stream(consumer);
    for (const std::string& what : fake_cuda::violations()) fail(__FILE__, __LINE__, what);
    EXPECT_EQ(fake_cuda::counts().events, 0u);
    EXPECT_EQ(fake_cuda::counts().streams, 0u);
  }

  Backend& make() {
    CudaOptions options;
    options.cast = &fake_cuda::cast;
    options.staging_bytes = 1u << 20;
    options.staging_buffers = 2;
    options.warn = [this](const std::string& message) { warnings.push_back(message); };
    options.allocate = [this](std::size_t bytes) {
      return StreamMemory{Memory(new std::byte[bytes], std::default_delete<std::byte[]>()),
                          reinterpret_cast<Stream>(allocation_stream)};
    };
    backend = make_cuda_backend(std::move(options));
    return *backend;
  }
  Stream stream() const { return reinterpret_cast<Stream>(consumer); }

  /// Holds the consumer's stream back until `open`.
  void hold() {
    fake_cuda::enqueue(consumer, [this] {
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
    fake_cuda::faults().query_error = error;
    EXPECT(!event->done());
  }
  fake_cuda::faults().query_error = 0;
  EXPECT(!event->done());
  fixture.open = true;
  fake_cuda::finish(fixture.consumer);
  EXPECT(event->done());
}

TEST(an_error_that_ends_all_work_ends_what_an_event_stands_for) {
  for (const int error : {226, 700, 721, 810, 911}) {
    Fixture fixture;
    Backend& backend = fixture.make();
    fixture.hold();
    const EventPtr event = backend.record(fixture.stream());
    fake_cuda::faults().query_error = error;
    EXPECT(event->done());
    fixture.open = true;
  }
}

TEST(the_host_waits_where_a_captured_stream_cannot) {
  Fixture fixture;
  Backend& backend = fixture.make();
  const std::vector<std::byte> bytes = random_bytes(1000, 7);
  std::vector<std::byte> device(bytes.size());
  const EventPtr copied = backend.copy(whole(source_of(bytes, Scalar::raw8, Scalar::raw8), device.data()));
  EXPECT(!backend.capturing(fixture.stream()));
  fake_cuda::capture(fixture.consumer, true);
  EXPECT(backend.capturing(fixture.stream()));
  backend.wait(fixture.stream(), copied);  // a wait of the stream's would be a violation
  EXPECT(device == bytes);
  fake_cuda::capture(fixture.consumer, false);
}

TEST(memory_is_released_in_the_order_of_its_readers) {
  Fixture fixture;
  Backend& backend = fixture.make();
  const Memory memory = backend.allocate(512);
  fixture.hold();
  const EventPtr read = backend.record(fixture.stream());
  EXPECT(backend.release_after(memory, {nullptr, read}));
  std::atomic<bool> reused{false};
  fake_cuda::enqueue(fixture.allocation_stream, [&] { reused = true; });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT(!reused);
  fixture.open = true;
  fake_cuda::finish(fixture.allocation_stream);
  EXPECT(reused);
  fake_cuda::capture(fixture.allocation_stream, true);
  EXPECT(!backend.release_after(memory, {backend.record(fixture.stream())}));
  fake_cuda::capture(fixture.allocation_stream, false);
}

TEST(without_kernels_the_readers_cast) {
  for (const Scalar wanted : {Scalar::bf16, Scalar::f64}) {
    Fixture fixture;
    fake_cuda::faults().no_kernels = true;
    Backend& backend = fixture.make();
    EXPECT_EQ(fixture.warnings.size(), 0u);
    const std::vector<std::byte> bytes = random_bytes(4096, 7);
    const SourcePtr source = source_of(bytes, Scalar::f32, wanted);
    std::vector<std::byte> device(source->wanted_bytes()), expected(source->wanted_bytes());
    fake_cuda::cast(expected.data(), wanted, bytes.data(), Scalar::f32, source->count);
    for (int i = 0; i < 2; ++i) {
      backend.wait(fixture.stream(), backend.copy(whole(source, device.data())));
      fake_cuda::finish(fixture.consumer);
      EXPECT(device == expected);
    }
    EXPECT_EQ(fake_cuda::counts().casts, 0u);
    EXPECT_EQ(fixture.warnings.size(), 1u);
  }
}
