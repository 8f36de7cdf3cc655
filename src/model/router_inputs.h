#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "src/model/model.h"
#include "vivace/status.h"
#include "vivace/stream.h"

namespace vivace::model {

/// What the routers of a model are given, kept in host memory as steps run: material for comparing ways to compute
/// scores. Takes tokens * hidden elements for each sparse layer. It must outlive the model's use of its observer.
class RouterInputs {
 public:
  /// `stream` is the one that steps run on; it is copied, but what it points to (threads, a dispatch) must outlive this.
  explicit RouterInputs(const Stream& stream) : stream_(stream) {}

  /// For Model::observe_calls(). On a GPU each router is waited for.
  Model::CallObserver observer();
  /// A safetensors file with "model.layers.N.router_input" [tokens, hidden] for each sparse layer, in the type of the
  /// activations and the order of steps.
  /// Fails  invalid_argument: the file exists. io_error: it cannot be made or written.
  Status write(const std::string& path) const;

 private:
  struct Rows {
    DType dtype = DType::none;
    int64_t hidden = 0;
    std::vector<uint8_t> bytes;
  };
  Status see(int64_t layer, const Tensor& x);

  Stream stream_;
  std::map<int64_t, Rows> layers_;
};

}  // namespace vivace::model
