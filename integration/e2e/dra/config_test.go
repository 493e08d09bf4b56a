// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

// opaque creates a claim that contains a configuration for Podlace's driver.
func (l *lab) opaque(name, parameters string) {
	l.Helper()
	l.create(`
kind: ResourceClaim
metadata: {name: ` + name + `}
spec:
  devices:
    requests: [` + l.exactly("nic") + `]
    config:
    - opaque: {driver: other.example.com, parameters: {anything: at all}}
    - ` + settings(parameters))
}

// settings returns a configuration entry for Podlace's driver, for use in a claim or a class.
func settings(parameters string) string {
	return "{opaque: {driver: sriov.podlace.io, parameters: {apiVersion: sriov.podlace.io/v1alpha1, kind: VFConfig, " + parameters + "}}}"
}

// TestBadConfig (failures 25, 26): the daemon refuses a claim with an unknown key, an invalid value, or a key for classes only. The pod
// waits without a VF. Its event has the key, the value, and their position in the configuration.
func TestBadConfig(t *testing.T) {
	l := newLab(t, setup{config: strings.Replace(fast, `"api": "dra"`, `"api": "dra", "claimMay": ["mtu", "ifName", {"vlan": "100-199"}]`, 1)})
	for name, c := range map[string]struct {
		parameters string
		says       []string
	}{
		"unknown": {"vlann: 100", []string{"config[1].opaque.parameters.vlann", "did you mean vlan"}},
		"type":    {`mtu: "big"`, []string{"mtu", "big"}},
		"value":   {"mtu: 12", []string{"mtu", "12"}},
		"range":   {"vlan: 200", []string{"vlan", "200", "100-199"}},
		"never":   {`mac: "02:00:00:00:00:01"`, []string{"mac", "02:00:00:00:00:01"}},
		"name":    {"ifName: eth0", []string{"config[1].opaque.parameters.ifName", "eth0"}},
		"kind":    {"mtu: 1400, resource: [1]", []string{"resource"}},
	} {
		l.opaque(name, c.parameters)
		l.pod(name, "nic="+name)
		t.Logf("%s: %.300s", c.parameters, l.event(name, append(c.says, "FailedPrepareDynamicResources")...))
	}
	if err := errors.Join(l.noRecords(), l.allHome()); err != nil {
		t.Error(err)
	}
}

// TestConfig: a claim's permitted settings override those of its class. Another driver's configuration is ignored.
func TestConfig(t *testing.T) {
	l := newLab(t, setup{})
	l.create(`
kind: DeviceClass
metadata: {name: ` + l.ns + `-admin}
spec:
  selectors: [{cel: {expression: 'device.driver == "sriov.podlace.io"'}}]
  config: [` + settings(`mtu: 1300, ifName: "class{index}"`) + `]
`)
	for name, c := range map[string]struct {
		parameters, ifName string
		mtu                int
	}{
		"class": {"", "class1", 1300},
		"claim": {", config: [" + settings("mtu: 1350") + "]", "class1", 1350},
	} {
		l.create("{kind: ResourceClaim, metadata: {name: " + name + "}, spec: {devices: {requests: [{name: nic, exactly: {deviceClassName: " +
			l.ns + "-admin}}]" + c.parameters + "}}}")
		l.pod(name, "nic="+name)
		l.runs(name)
		if got, ok := l.inside(name)[c.ifName]; !ok || got.MTU != c.mtu {
			t.Errorf("%s: %+v: want %s with MTU %d", name, l.inside(name), c.ifName, c.mtu)
		}
	}
}

// TestStatusForbidden (failure 28): pods run even if the daemon may not write the status of claims, which it logs once.
func TestStatusForbidden(t *testing.T) {
	l := newLab(t, setup{})
	l.withoutRule("resourceclaims/status")
	l.template("vf", "nic")
	for i := range 3 {
		name := fmt.Sprint("web-", i)
		l.pod(name, "nic=+vf")
		l.runs(name)
		l.attached(name, l.allocated(l.claimOf(name, "nic"))...)
	}
	within(t, "the daemon says what it lacks", func() error {
		if l.says("resourceclaims/status") == 0 {
			return errors.New("it says nothing")
		}
		return nil
	})
	remains(t, "the daemon logs it once", func() error {
		if n := l.says("resourceclaims/status"); n > 1 {
			return fmt.Errorf("the daemon logged the reason %d times, want once", n)
		}
		return nil
	})
}
