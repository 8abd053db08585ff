#include "shapes.h"

#include <utility>

namespace dynswap::test {

namespace {

std::string numbered(const std::string& name, std::size_t number) {
  return name + "." + std::to_string(number);
}

}  // namespace

std::uint64_t Shape::bytes() const {
  std::uint64_t total = 0;
  for (const sim::Layer& layer : workload_.layers) total += layer.bytes;
  return total;
}

sim::Workload Shape::balance(Compute compute, double ratio, double bytes_per_second) const {
  sim::Workload balanced = workload_;
  double work = 0;
  for (sim::Layer& layer : balanced.layers) {
    if (compute == Compute::bytes) layer.compute_seconds = static_cast<double>(layer.bytes);
    work += layer.compute_seconds;
  }
  const double scale = ratio * static_cast<double>(bytes()) / bytes_per_second / work;
  for (sim::Layer& layer : balanced.layers) layer.compute_seconds *= scale;
  return balanced;
}

Shape uniform(std::size_t layers, std::uint64_t elements) {
  Shape shape;
  for (std::size_t i = 0; i < layers; ++i) shape.module().weight(numbered("layer", i), elements);
  return shape;
}

// Llama 3 8B: 32 layers, hidden 4096, 8 key-value heads of 128, intermediate 14336, vocabulary 128256.
Shape llama_3_8b() {
  constexpr std::uint64_t kHidden = 4096, kKeys = 1024, kInner = 14336, kWords = 128256;
  Shape shape;
  shape.module().weight("embed", kWords * kHidden, 0);  // a lookup: no work to speak of
  for (std::size_t i = 0; i < 32; ++i) {
    const std::string name = numbered("layers", i);
    shape.norm(name + ".input_norm", kHidden)
        .linear(name + ".q", kHidden, kHidden, false)
        .linear(name + ".k", kHidden, kKeys, false)
        .linear(name + ".v", kHidden, kKeys, false)
        .linear(name + ".o", kHidden, kHidden, false)
        .norm(name + ".post_norm", kHidden)
        .linear(name + ".gate", kHidden, kInner, false)
        .linear(name + ".up", kHidden, kInner, false)
        .linear(name + ".down", kInner, kHidden, false);
  }
  return shape.norm("norm", kHidden).linear("lm_head", kHidden, kWords, false);
}

// FLUX.1 transformer: 19 double blocks and 38 single blocks, hidden 3072. Image tokens outnumber text
// tokens 8 to 1; modulations and embedders work on one token.
Shape flux_transformer() {
  constexpr std::uint64_t kHidden = 3072, kInner = 4 * kHidden, kHead = 128;
  constexpr double kImage = 1, kText = 1.0 / 8, kOne = 1.0 / 4096;
  Shape shape;
  shape.linear("time.1", 256, kHidden, true, kOne)
      .linear("time.2", kHidden, kHidden, true, kOne)
      .linear("guidance.1", 256, kHidden, true, kOne)
      .linear("guidance.2", kHidden, kHidden, true, kOne)
      .linear("pooled.1", 768, kHidden, true, kOne)
      .linear("pooled.2", kHidden, kHidden, true, kOne)
      .linear("context", 4096, kHidden, true, kText)
      .linear("image", 64, kHidden, true, kImage);
  for (std::size_t i = 0; i < 19; ++i) {
    const std::string name = numbered("double", i);
    shape.linear(name + ".norm", kHidden, 6 * kHidden, true, kOne)
        .linear(name + ".norm_context", kHidden, 6 * kHidden, true, kOne)
        .norm(name + ".norm_q", kHead)
        .norm(name + ".norm_k", kHead);
    for (const char* part : {".q", ".k", ".v"}) shape.linear(name + part, kHidden, kHidden, true, kImage);
    for (const char* part : {".add_q", ".add_k", ".add_v"}) {
      shape.linear(name + part, kHidden, kHidden, true, kText);
    }
    shape.linear(name + ".out", kHidden, kHidden, true, kImage)
        .linear(name + ".add_out", kHidden, kHidden, true, kText)
        .linear(name + ".ff.1", kHidden, kInner, true, kImage)
        .linear(name + ".ff.2", kInner, kHidden, true, kImage)
        .linear(name + ".ff_context.1", kHidden, kInner, true, kText)
        .linear(name + ".ff_context.2", kInner, kHidden, true, kText);
  }
  for (std::size_t i = 0; i < 38; ++i) {
    const std::string name = numbered("single", i);
    shape.linear(name + ".norm", kHidden, 3 * kHidden, true, kOne)
        .linear(name + ".mlp", kHidden, kInner, true, kImage)
        .linear(name + ".q", kHidden, kHidden, true, kImage)
        .linear(name + ".k", kHidden, kHidden, true, kImage)
        .linear(name + ".v", kHidden, kHidden, true, kImage)
        .norm(name + ".norm_q", kHead)
        .norm(name + ".norm_k", kHead)
        .linear(name + ".out", kHidden + kInner, kHidden, true, kImage);
  }
  return shape.linear("norm_out", kHidden, 2 * kHidden, true, kOne).linear("out", kHidden, 64, true, kImage);
}

namespace {

/// A residual block of a UNet, at a resolution with `pixels` (relative).
void residual(Shape& shape, const std::string& name, std::uint64_t in, std::uint64_t out, double pixels) {
  shape.norm(name + ".norm1", in, true).convolution(name + ".conv1", in, out, 3, pixels);
  shape.linear(name + ".time", 1280, out, true, 1.0 / 4096);
  shape.norm(name + ".norm2", out, true).convolution(name + ".conv2", out, out, 3, pixels);
  if (in != out) shape.convolution(name + ".shortcut", in, out, 1, pixels);
}

/// `depth` transformer blocks over the pixels, with cross attention to 77 text tokens of 2048.
void attention(Shape& shape, const std::string& name, std::uint64_t size, std::size_t depth, double pixels) {
  constexpr std::uint64_t kText = 2048;
  const double text = 77.0 / 16384;
  shape.norm(name + ".norm", size, true).linear(name + ".in", size, size, true, pixels);
  for (std::size_t i = 0; i < depth; ++i) {
    const std::string block = numbered(name, i);
    shape.norm(block + ".norm1", size, true);
    for (const char* part : {".q1", ".k1", ".v1"}) shape.linear(block + part, size, size, false, pixels);
    shape.linear(block + ".out1", size, size, true, pixels).norm(block + ".norm2", size, true);
    shape.linear(block + ".q2", size, size, false, pixels)
        .linear(block + ".k2", kText, size, false, text)
        .linear(block + ".v2", kText, size, false, text)
        .linear(block + ".out2", size, size, true, pixels)
        .norm(block + ".norm3", size, true)
        .linear(block + ".ff1", size, 8 * size, true, pixels)
        .linear(block + ".ff2", 4 * size, size, true, pixels);
  }
  shape.linear(name + ".proj", size, size, true, pixels);
}

}  // namespace

// SDXL UNet at 1024 x 1024: latents of 128 x 128 (pixels = 1), 64 x 64 (1/4), 32 x 32 (1/16).
Shape sdxl_unet() {
  Shape shape;
  shape.linear("time.1", 320, 1280, true, 1.0 / 16384)
      .linear("time.2", 1280, 1280, true, 1.0 / 16384)
      .linear("added.1", 2816, 1280, true, 1.0 / 16384)
      .linear("added.2", 1280, 1280, true, 1.0 / 16384)
      .convolution("in", 4, 320, 3, 1);
  residual(shape, "down0.res0", 320, 320, 1);
  residual(shape, "down0.res1", 320, 320, 1);
  shape.convolution("down0.sample", 320, 320, 3, 1.0 / 4);
  residual(shape, "down1.res0", 320, 640, 1.0 / 4);
  attention(shape, "down1.attn0", 640, 2, 1.0 / 4);
  residual(shape, "down1.res1", 640, 640, 1.0 / 4);
  attention(shape, "down1.attn1", 640, 2, 1.0 / 4);
  shape.convolution("down1.sample", 640, 640, 3, 1.0 / 16);
  residual(shape, "down2.res0", 640, 1280, 1.0 / 16);
  attention(shape, "down2.attn0", 1280, 10, 1.0 / 16);
  residual(shape, "down2.res1", 1280, 1280, 1.0 / 16);
  attention(shape, "down2.attn1", 1280, 10, 1.0 / 16);
  residual(shape, "mid.res0", 1280, 1280, 1.0 / 16);
  attention(shape, "mid.attn", 1280, 10, 1.0 / 16);
  residual(shape, "mid.res1", 1280, 1280, 1.0 / 16);
  const std::uint64_t up0[] = {2560, 2560, 1920};
  for (std::size_t i = 0; i < 3; ++i) {
    residual(shape, numbered("up0.res", i), up0[i], 1280, 1.0 / 16);
    attention(shape, numbered("up0.attn", i), 1280, 10, 1.0 / 16);
  }
  shape.convolution("up0.sample", 1280, 1280, 3, 1.0 / 4);
  const std::uint64_t up1[] = {1920, 1280, 960};
  for (std::size_t i = 0; i < 3; ++i) {
    residual(shape, numbered("up1.res", i), up1[i], 640, 1.0 / 4);
    attention(shape, numbered("up1.attn", i), 640, 2, 1.0 / 4);
  }
  shape.convolution("up1.sample", 640, 640, 3, 1);
  const std::uint64_t up2[] = {960, 640, 640};
  for (std::size_t i = 0; i < 3; ++i) residual(shape, numbered("up2.res", i), up2[i], 320, 1);
  return shape.norm("out.norm", 320, true).convolution("out", 320, 4, 3, 1);
}

}  // namespace dynswap::test
