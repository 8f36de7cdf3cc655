// One operator in C++: y = x . weight^T + bias, which row runs it, and what a call that does not fit says.

#include <iostream>
#include <vector>

#include "vivace/linear.h"

int main() {
  // Memory is the caller's; a tensor is a view of it.
  std::vector<float> x = {1, 2, 3, 4}, weight = {1, 0, 0, 1, 1, 1}, bias = {0, 0, 10}, y(6);
  vivace::LinearArgs args;
  args.x = vivace::Tensor(x.data(), vivace::DType::f32, {2, 2});
  args.parts[0] = {.weight = vivace::Tensor(weight.data(), vivace::DType::f32, {3, 2}),
                   .weight_scale = {},
                   .bias = vivace::Tensor(bias.data(), vivace::DType::f32, {3}),
                   .y = vivace::Tensor(y.data(), vivace::DType::f32, {2, 3})};
  const vivace::Stream
      stream;  // the CPU, on this thread; for a GPU: device, ordinal, compute capability, handle

  // Operators allocate nothing: scratch is asked for, and given.
  const auto bytes = vivace::linear_workspace_bytes(args, stream);
  if (!bytes.ok()) {
    std::cerr << bytes.status().message() << "\n";
    return 1;
  }
  std::vector<unsigned char> scratch(static_cast<size_t>(*bytes));
  if (*bytes > 0) args.workspace = vivace::Tensor(scratch.data(), vivace::DType::u8, {*bytes});
  std::cout << "row " << vivace::linear_explain(args, stream).row << "\n";
  if (const vivace::Status status = vivace::linear(args, stream); !status.ok()) {
    std::cerr << status.message() << "\n";
    return 1;
  }
  for (size_t i = 0; i < y.size(); ++i) std::cout << y[i] << (i % 3 == 2 ? "\n" : " ");

  args.parts[0].bias = vivace::Tensor(bias.data(), vivace::DType::f32, {2});
  std::cout << vivace::linear(args, stream).message() << "\n";
}
