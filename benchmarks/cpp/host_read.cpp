// Does a pass over a cold file through HostBackend run at the speed of the disk?
//
//   host_read FILE [group MiB = 16] [threads = 4] [shift = 0] [cast = 0]
//
// Reads all of FILE in groups through a ring of three slots, as the engine does, and prints one line of JSON:
// bytes per second and CPU seconds per pass, beside `dd iflag=direct bs=4M` in the same run, the two in
// turns. The page cache is dropped before each pass (needs root). `shift` starts so many bytes into the
// file: 8 is what an ordinary safetensors header does, and keeps the disk from writing into place. `cast`
// takes the file for fp32 and casts it to bf16.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "host/host_backend.h"
#include "io/file.h"

namespace {

using namespace dynswap;

constexpr int kRing = 3;
constexpr int kRounds = 5;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double cpu_seconds(int who) {
  rusage usage{};
  ::getrusage(who, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

bool drop_caches() {
  ::sync();
  const int fd = ::open("/proc/sys/vm/drop_caches", O_WRONLY);
  const bool dropped = fd >= 0 && ::write(fd, "3", 1) == 1;
  if (fd >= 0) ::close(fd);
  return dropped;
}

void cast_to_bf16(void* dst, Scalar, const void* src, Scalar, std::size_t count) {
  auto* out = static_cast<std::uint16_t*>(dst);
  const auto* in = static_cast<const std::uint32_t*>(src);
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = static_cast<std::uint16_t>((in[i] + 0x7fff + ((in[i] >> 16) & 1)) >> 16);
  }
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, long otherwise) { return argc > i ? std::atol(argv[i]) : otherwise; };
  if (argc < 2) return std::fprintf(stderr, "host_read FILE [group MiB] [threads] [shift] [cast]\n"), 2;
  const std::string path = argv[1];
  const auto group = static_cast<std::size_t>(argument(2, 16)) << 20;
  const int threads = static_cast<int>(argument(3, 4));
  const auto shift = static_cast<std::uint64_t>(argument(4, 0));
  const bool cast = argument(5, 0) != 0;

  const auto file = File::open(path);
  HostBackend backend(&cast_to_bf16, threads);
  const std::size_t slot_bytes = group + 2 * HostBackend::kTraits.alignment;
  const Memory ring = backend.allocate(kRing * slot_bytes);
  std::memset(ring.get(), 1, kRing * slot_bytes);  // a ring that is in use has its pages

  std::vector<double> speed, cpu, dd_speed, dd_cpu;
  const std::string dd = "dd if='" + path + "' of=/dev/null iflag=direct bs=4M status=none";
  for (int round = 0; round < kRounds; ++round) {
    if (!drop_caches()) return std::fprintf(stderr, "cannot drop the page cache: not root\n"), 2;
    double begin = now(), busy = cpu_seconds(RUSAGE_CHILDREN);
    if (std::system(dd.c_str()) != 0) return 2;
    dd_speed.push_back(static_cast<double>(file->size()) / (now() - begin));
    dd_cpu.push_back(cpu_seconds(RUSAGE_CHILDREN) - busy);

    if (!drop_caches()) return 2;
    begin = now(), busy = cpu_seconds(RUSAGE_SELF);
    std::vector<EventPtr> copies;
    const auto issue = [&](std::uint64_t at) {
      auto source = std::make_shared<Source>();
      source->name = "group";
      source->stored = cast ? Scalar::f32 : Scalar::raw8;
      source->wanted = cast ? Scalar::bf16 : Scalar::raw8;
      source->file = file;
      source->offset = at;
      source->count = std::min<std::uint64_t>(group, file->size() - at) / scalar_size(source->stored);
      std::byte* slot =
          ring.get() + (copies.size() % kRing) * slot_bytes + HostBackend::kTraits.phase(*source).value_or(0);
      CopyRequest request;
      request.steps.push_back({{}, {{source, 0, source->count, slot}}});
      copies.push_back(backend.copy(std::move(request)));
    };
    std::uint64_t at = shift;
    for (std::size_t used = 0; at < file->size() || used < copies.size();) {
      while (at < file->size() && copies.size() < used + kRing) {
        issue(at);
        at += group;
      }
      backend.wait(0, copies[used++]);
    }
    speed.push_back(static_cast<double>(file->size() - shift) / (now() - begin));
    cpu.push_back(cpu_seconds(RUSAGE_SELF) - busy);
  }
  std::printf(
      "{\"file_bytes\": %llu, \"group_bytes\": %zu, \"threads\": %d, \"shift\": %llu, \"cast\": %s, "
      "\"bytes_per_s\": %.4g, \"cpu_s\": %.3f, \"dd_bytes_per_s\": %.4g, \"dd_cpu_s\": %.3f, \"ratio\": "
      "%.3f}\n",
      static_cast<unsigned long long>(file->size()), group, threads, static_cast<unsigned long long>(shift),
      cast ? "true" : "false", median(speed), median(cpu), median(dd_speed), median(dd_cpu),
      median(speed) / median(dd_speed));
}
