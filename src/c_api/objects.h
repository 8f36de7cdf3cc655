#pragma once

#include "vivace/c_api.h"
#include "vivace/status.h"

namespace vivace::c_api {

/// Copies the arguments with every object in them replaced by the tensor that it is, and says where the first one lies.
///
/// Fails    invalid_argument: the call is not described as it should be, or a tensor has a type, rank or device that is not known.
///          internal: the exchange failed.
Status fill_objects(const vivace_object_call& call, const void* args, unsigned char* filled,
                    vivace_stream& stream);

}  // namespace vivace::c_api
