#include "kernels/cuda/device_ops.h"

#include "kernels/cuda/language.h"

namespace retrace::cuda {
namespace {

template <class T>
OpTable<T> MakeTable() {
  OpTable<T> table = {};
  AddElementOps(&table);
  AddRowOps(&table);
  return table;
}

}  // namespace

LaunchShape& launch_shape() {
  static LaunchShape shape;
  return shape;
}

template <>
const OpTable<float>& DeviceOps<float>() {
  static const OpTable<float> table = MakeTable<float>();
  return table;
}

template <>
const OpTable<double>& DeviceOps<double>() {
  static const OpTable<double> table = MakeTable<double>();
  return table;
}

}  // namespace retrace::cuda
