#include "surgery/replica_source.h"

#include <limits>

namespace retrace {

std::function<void(const UpdateRecord&, const Digest&)> Observe(Replica* replica,
                                                                const Tick& tick) {
  return [replica, &tick](const UpdateRecord& record, const Digest& digest) {
    replica->losses.push_back(record.evaluation_loss.value_or(record.loss));
    replica->state = digest;
    tick();
  };
}

void Halt(Replica* replica) {
  replica->halted = true;
  replica->losses.push_back(std::numeric_limits<double>::infinity());
}

}  // namespace retrace
