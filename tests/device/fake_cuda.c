// A CUDA driver without a GPU: what Triton's launcher calls, with answers of an H200. Launches run nothing; each is
// logged as function, grid and block, stream, number of attributes, and the bytes of its parameters.
//
//     cc -shared -fPIC -Wl,-soname,libcuda.so.1 -I<triton>/backends/nvidia/include fake_cuda.c -o libcuda.so.1
#include <string.h>

#include "cuda.h"

#define ANSWER(signature, ...) \
  CUresult signature {         \
    __VA_ARGS__;               \
    return CUDA_SUCCESS;       \
  }

static size_t handles = 0x1000;

ANSWER(cuInit(unsigned flags))
ANSWER(cuDriverGetVersion(int *version), *version = 12080)
ANSWER(cuDeviceGet(CUdevice *device, int ordinal), *device = ordinal)
ANSWER(cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device), *context = (CUcontext)1)
ANSWER(cuCtxGetCurrent(CUcontext *context), *context = (CUcontext)1)
ANSWER(cuCtxSetCurrent(CUcontext context))
ANSWER(cuCtxGetDevice(CUdevice *device), *device = 0)
ANSWER(cuCtxGetLimit(size_t *value, CUlimit limit), *value = 1 << 20)
ANSWER(cuCtxSetLimit(CUlimit limit, size_t value))
ANSWER(cuModuleLoadData(CUmodule *module, const void *image), *module = (CUmodule)(handles += 16))
ANSWER(cuModuleUnload(CUmodule module))
ANSWER(cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name),
       *function = (CUfunction)(handles += 16))
ANSWER(cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function),
       *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0)
ANSWER(cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value))
ANSWER(cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config))
ANSWER(cuGetErrorString(CUresult error, const char **text), *text = "an error of the fake driver")
ANSWER(cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config), *clusters = 1)
ANSWER(cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer),
       *(CUdeviceptr *)data = pointer)
ANSWER(cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status),
       *status = CU_STREAM_CAPTURE_STATUS_NONE)

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    *value = 232448;
    break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    *value = 132;
    break;
  default:
    *value = 1024;
  }
  return CUDA_SUCCESS;
}

// The address comes first, so that a log can be compared with one of other addresses.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  cuuint64_t *words = (cuuint64_t *)map;
  memset(map, 0, sizeof *map);
  *words++ = (cuuint64_t)address;
  *words++ = type | rank << 8 | swizzle << 16 | interleave << 20 | promotion << 24 | fill << 28;
  for (cuuint32_t i = 0; i < rank; i++) {
    *words++ = shape[i];
    *words++ = box[i] | (cuuint64_t)element_strides[i] << 32;
    if (i + 1 < rank)
      *words++ = strides[i];
  }
  return CUDA_SUCCESS;
}

enum { MAX_FUNCTIONS = 256, MAX_PARAMETERS = 128, LOG_BYTES = 1 << 20 };

static struct {
  CUfunction function;
  int num_parameters, sizes[MAX_PARAMETERS];
} known[MAX_FUNCTIONS];
static int num_known;
static unsigned char log_bytes[LOG_BYTES];
static int log_length;

// Sizes in bytes of a function's parameters: without them a launch tells no end of its list.
void fake_cuda_describe(size_t function, int num_parameters, const int *sizes) {
  known[num_known].function = (CUfunction)function;
  known[num_known].num_parameters = num_parameters;
  memcpy(known[num_known++].sizes, sizes, num_parameters * sizeof *sizes);
}

// Copies the log and empties it: entries of (size, bytes). Returns its length.
int fake_cuda_take_log(unsigned char *target) {
  int length = log_length;
  memcpy(target, log_bytes, length);
  log_length = 0;
  return length;
}

static void append(const void *bytes, int size) {
  if (log_length + (int)sizeof size + size > LOG_BYTES)
    return;
  memcpy(log_bytes + log_length, &size, sizeof size);
  memcpy(log_bytes + log_length + sizeof size, bytes, size);
  log_length += sizeof size + size;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  unsigned sizes[8] = {config->gridDimX,  config->gridDimY,  config->gridDimZ,       config->blockDimX,
                       config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->numAttrs};
  append(&function, sizeof function);
  append(sizes, sizeof sizes);
  append(&config->hStream, sizeof config->hStream);
  for (int i = 0; i < num_known; i++)
    if (known[i].function == function)
      for (int j = 0; j < known[i].num_parameters; j++)
        append(parameters[j], known[i].sizes[j]);
  return CUDA_SUCCESS;
}
