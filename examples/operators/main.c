/* One operator in C: y = x . weight^T + bias, which row runs it, and what a call that does not fit says. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "vivace/c_api.h"

/* A view of rows of f32, or of one row. */
static vivace_tensor view(float* data, int64_t rows, int64_t columns) {
  vivace_tensor tensor = {.data = data, .dtype = VIVACE_F32, .device = VIVACE_DEVICE_CPU};
  if (rows > 0) {
    tensor.shape[tensor.rank] = rows;
    tensor.stride[tensor.rank++] = columns;
  }
  tensor.shape[tensor.rank] = columns;
  tensor.stride[tensor.rank++] = 1;
  return tensor;
}

int main(void) {
  float x[] = {1, 2, 3, 4}, weight[] = {1, 0, 0, 1, 1, 1}, bias[] = {0, 0, 10}, y[6];
  vivace_linear_args args = {.struct_bytes = sizeof args, .part_count = 1}; /* what is not set is absent */
  args.x = view(x, 2, 2);
  args.parts[0].weight = view(weight, 3, 2);
  args.parts[0].bias = view(bias, 0, 3);
  args.parts[0].y = view(y, 2, 3);

  /* No stream: the CPU, on this thread. A vivace_stream names a GPU, and a context with threads and preferences. */
  int64_t bytes = 0;
  const char* json = NULL;
  if (vivace_linear_workspace_bytes(&args, NULL, &bytes) != VIVACE_OK ||
      vivace_linear_explain(&args, NULL, &json) != VIVACE_OK) {
    fprintf(stderr, "%s\n", vivace_last_error());
    return 1;
  }
  printf("%s\n", json);
  void* scratch = malloc(bytes > 0 ? (size_t)bytes : 1);
  if (scratch == NULL) return 1;
  if (bytes > 0) {
    args.workspace =
        (vivace_tensor){.data = scratch, .dtype = VIVACE_U8, .rank = 1, .shape = {bytes}, .stride = {1}};
  }
  const vivace_code code = vivace_linear(&args, NULL);
  if (code != VIVACE_OK) fprintf(stderr, "%s\n", vivace_last_error());
  for (int i = 0; code == VIVACE_OK && i < 6; ++i) printf("%g%c", y[i], i % 3 == 2 ? '\n' : ' ');

  args.parts[0].bias = view(bias, 0, 2);
  if (vivace_linear(&args, NULL) == VIVACE_INVALID_ARGUMENT) printf("%s\n", vivace_last_error());
  free(scratch);
  return code != VIVACE_OK;
}
