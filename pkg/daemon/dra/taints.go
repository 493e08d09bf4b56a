// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podlace/podlace/pkg/claim"
)

// These constants are the keys of the taints that the driver sets.
const (
	taintLinkDown  = claim.Driver + "/link-down" // value: the PF
	taintUnhealthy = claim.Driver + "/unhealthy" // value: the kind of the fault
	taintGone      = claim.Driver + "/gone"
	taintHeld      = claim.Driver + "/held" // the interface is still in the namespace of an ended pod

	noTaint = "off"
)

// maxLabel is the maximum length of a label value in characters. The same limit applies to the value of a taint.
const maxLabel = 63

// taintsOf returns the taints of an existing device. "held", an interface still in the namespace of an ended pod, is never among those
// of a claimed one.
func (i Inventory) taintsOf(id, pf string, prepared bool) []resourceapi.DeviceTaint {
	fault, faulty := i.Faults[id]
	switch {
	case !faulty, fault.Kind == Held && prepared:
		return nil
	case fault.Kind == Held:
		return taint(taintHeld, "", string(resourceapi.DeviceTaintEffectNoSchedule))
	case fault.Kind == LinkDown:
		return taint(taintLinkDown, pf, i.Taints.LinkDown)
	}
	return taint(taintUnhealthy, fault.Kind, i.Taints.Unhealthy)
}

// taint returns a list with one taint, or an empty list if the configuration disables the taint.
func taint(key, value, effect string) []resourceapi.DeviceTaint {
	if effect == noTaint || effect == "" {
		return nil
	}
	return []resourceapi.DeviceTaint{{Key: key, Value: labelValue(value), Effect: resourceapi.DeviceTaintEffect(effect)}}
}

// repels reports whether the taints keep new pods away from the device.
func repels(taints []resourceapi.DeviceTaint) bool {
	return slices.ContainsFunc(taints, func(t resourceapi.DeviceTaint) bool { return t.Effect != resourceapi.DeviceTaintEffectNone })
}

func labelValue(s string) string {
	alphanumeric := func(c rune) bool { return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' }
	s = strings.Map(func(c rune) rune {
		if alphanumeric(c) || strings.ContainsRune("-_.", c) {
			return c
		}
		return '-'
	}, s)
	return strings.TrimFunc(s[:min(len(s), maxLabel)], func(c rune) bool { return !alphanumeric(c) })
}

// keepTimes sets the time of each taint: that of an equal former one, or else the current time. The API server does not keep it when
// the device moves to another slice.
func keepTimes(taints, former []resourceapi.DeviceTaint, now metav1.Time) {
	for i := range taints {
		t := &taints[i]
		t.TimeAdded = &now
		for _, f := range former {
			if f.Key == t.Key && f.Value == t.Value && f.Effect == t.Effect && f.TimeAdded != nil {
				t.TimeAdded = f.TimeAdded
			}
		}
	}
}
