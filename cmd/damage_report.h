// How damage of a run is shown. Used by `retrace verify`, `fsck` and `repair`.
#ifndef RETRACE_CMD_DAMAGE_REPORT_H_
#define RETRACE_CMD_DAMAGE_REPORT_H_

#include <string>
#include <vector>

#include "cmd/console.h"
#include "formats/run_check.h"

namespace retrace {

// Lines for a person; remarks are left out when quiet.
std::string DamageText(const OutputFlags& flags, const std::vector<Damage>& damage,
                       const std::vector<std::string>& remarks);

// A JSON list of {message, tensors, position}.
std::string DamageJson(const std::vector<Damage>& damage);

}  // namespace retrace

#endif  // RETRACE_CMD_DAMAGE_REPORT_H_
