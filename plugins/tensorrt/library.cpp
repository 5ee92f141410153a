// What TensorRT looks for in a plugin library.
#include <iterator>

#include "dustin/kernels.h"
#include "log.h"
#include "plugin.h"

extern "C" {

DUSTIN_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  dustin::tensorrt::use_logger_finder(finder);
}

DUSTIN_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  using namespace dustin::tensorrt;
  static Creator creators[] = {Creator(kv_append()), Creator(srh_score()), Creator(select_tokens()),
                               Creator(sparse_attention()), Creator(dense_attention())};
  static nvinfer1::IPluginCreatorInterface* const list[] = {
      &creators[0], &creators[1], &creators[2], &creators[3], &creators[4]};
  count = static_cast<int32_t>(std::size(list));
  return list;
}
}
