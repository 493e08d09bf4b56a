// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// configEntryFrom returns a config entry of an allocation from the class or the claim, with the JSON of its parameters in `keys`.
func configEntryFrom(source resourceapi.AllocationConfigSource, keys string, requests ...string) resourceapi.DeviceAllocationConfiguration {
	text := `{"apiVersion":"` + vfconfig.APIVersion + `","kind":"` + vfconfig.Kind + `"`
	if keys != "" {
		text += "," + keys
	}
	return foreignEntry(source, claim.Driver, text+"}", requests...)
}

// foreignEntry returns a config entry for the given driver, which may be a driver of another project.
func foreignEntry(source resourceapi.AllocationConfigSource, driver, parameters string, requests ...string) (
	_ resourceapi.DeviceAllocationConfiguration) {
	return resourceapi.DeviceAllocationConfiguration{Source: source, Requests: requests, DeviceConfiguration: resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(parameters)}}}}
}

func fromClass(keys string, requests ...string) resourceapi.DeviceAllocationConfiguration {
	return configEntryFrom(resourceapi.AllocationConfigSourceClass, keys, requests...)
}

func fromClaim(keys string, requests ...string) resourceapi.DeviceAllocationConfiguration {
	return configEntryFrom(resourceapi.AllocationConfigSourceClaim, keys, requests...)
}

// mayAll returns a resource that allows claims to set several keys (claimMay).
func mayAll(t *testing.T) *pool.Resource {
	t.Helper()
	c, err := pool.Parse(pool.Source{File: "f", Prefix: "example.com"}, []byte(`{"resourceList":[{"resourceName":"fast","api":"dra",
		"claimMay":["mac","ips","ifName","mtu","minTxRate",{"vlan":"100-199,300","maxTxRate":1000}]}]}`))
	must(t, err)
	return &c.Resources[0]
}

type configs = []resourceapi.DeviceAllocationConfiguration

// TestConfigFor checks which config entries apply to a device, in which order, and which keys a claim may set.
func TestConfigFor(t *testing.T) {
	one := []string{"vf"}
	for _, test := range []struct {
		name    string
		results []string // requests with a device each; the first is checked
		configs configs
		want    *vfconfig.Config
		says    string
	}{
		{name: "none", results: one},
		{name: "only the kind", results: one, configs: configs{fromClass(""), fromClaim("")}},
		// Requests.
		{name: "no requests are all (1.37, and classes to 1.34)", results: one, configs: configs{fromClass(`"vlan":5`)},
			want: &vfconfig.Config{VLAN: new(5)}},
		{name: "the request", results: one, configs: configs{fromClass(`"vlan":5`, "other", "vf")}, want: &vfconfig.Config{VLAN: new(5)}},
		{name: "another request", results: one, configs: configs{fromClass(`"vlan":5`, "other"), fromClass(`"vlan":6`, "vf/a")}},
		{name: "a subrequest by its request", results: []string{"vf/a"}, configs: configs{fromClass(`"vlan":5`, "vf")},
			want: &vfconfig.Config{VLAN: new(5)}},
		{name: "a subrequest by itself", results: []string{"vf/a"}, configs: configs{fromClaim(`"mtu":1400`, "vf/a"),
			fromClaim(`"mtu":1300`, "vf/b"),
			fromClaim(`"mtu":1200`, "a")}, want: &vfconfig.Config{MTU: new(1400), Claimed: []string{"mtu"}}},
		// Resources.
		{name: "the resource", results: one, configs: configs{fromClass(`"resource":"example.com/fast","vlan":5`),
			fromClass(`"resource":"example.com/slow","vlan":6`)}, want: &vfconfig.Config{VLAN: new(5)}},
		// Order.
		{name: "class, then claim, each in order", results: one, configs: configs{fromClaim(`"vlan":100`), fromClass(`"vlan":5,"trust":"on"`),
			fromClaim(`"vlan":300,"mtu":1400`), fromClass(`"vlan":6`), fromClaim(`"maxTxRate":1000`)},
			want: &vfconfig.Config{VLAN: new(300), Trust: "on", MTU: new(1400), MaxTxRate: new(1000),
				Claimed: []string{"vlan", "mtu", "maxTxRate"}}},
		{name: "a class sets what claims may not", results: one, configs: configs{fromClass(`"vlan":5,"trust":"on","maxTxRate":5000`)},
			want: &vfconfig.Config{VLAN: new(5), Trust: "on", MaxTxRate: new(5000)}},
		{name: "a VLAN of the conflist may follow", results: one, configs: configs{fromClass(`"vlanQoS":3`)},
			want: &vfconfig.Config{VLANQoS: new(3)}},
		{name: "one MAC each", results: []string{"vf", "other"}, configs: configs{fromClaim(`"mac":"02:00:00:00:00:01"`, "vf"),
			fromClaim(`"mac":"02:00:00:00:00:02"`, "other")}, want: &vfconfig.Config{MAC: "02:00:00:00:00:01", Claimed: []string{"mac"}}},
		{name: "names by index", results: []string{"vf", "vf"}, configs: configs{fromClass(`"ifName":"fast{index}"`)},
			want: &vfconfig.Config{IfName: "fast{index}"}},
		{name: "an administrator's access sets nothing", results: []string{"vf admin"}, configs: configs{fromClass(`"vlan":5`)}},
		// Other drivers.
		{name: "entries for other drivers are ignored", results: one, configs: configs{foreignEntry("FromClaim", "gpu.example.com", "{"),
			{Source: "FromClass"}}},
		// Refused.
		{name: "unknown key", results: one, configs: configs{foreignEntry("FromClass", "gpu.example.com", "{"), fromClass(""),
			fromClaim(`"vlann":1`)},
			says: "config[0].opaque.parameters.vlann: unknown key; did you mean vlan?"},
		{name: "unknown key for another request", results: one, configs: configs{fromClaim(`"vlann":1`, "other")},
			says: "config[0].opaque.parameters.vlann: unknown key; did you mean vlan?"},
		{name: "not for claims", results: one, configs: configs{fromClaim(`"mtu":1400,"trust":"on"`)},
			says: `config[0].opaque.parameters.trust "on": ` + "claims may not set it; they may set: vlan 100-199,300, mac, minTxRate, maxTxRate 1-1000, mtu, ifName, ips of resource example.com/fast"},
		{name: "out of range", results: one, configs: configs{fromClass(`"vlan":5`), fromClaim(`"vlan":6`)},
			says: "config[0].opaque.parameters.vlan 6: claims may set 100-199,300 of resource example.com/fast"},
		{name: "no limit is over the limit", results: one, configs: configs{fromClaim(`"maxTxRate":0`)},
			says: "config[0].opaque.parameters.maxTxRate 0: claims may set 1-1000 of resource example.com/fast"},
		{name: "together", results: one, configs: configs{fromClass(`"maxTxRate":100`), fromClaim(`"minTxRate":200`)},
			says: "the merged settings of class and claim: minTxRate 200: more than maxTxRate 100"},
		{name: "unknown source", results: one, configs: configs{configEntryFrom("FromPod", "")},
			says: `status.allocation.devices.config[0].source: "FromPod": want FromClass or FromClaim`},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := newClaim("c-1", "web")
			a := c.Status.Allocation
			a.Devices.Config = test.configs
			for _, request := range test.results {
				name, access, _ := strings.Cut(request, " ")
				a.Devices.Results = append(a.Devices.Results, resourceapi.DeviceRequestAllocationResult{Request: name, Driver: claim.Driver,
					AdminAccess: new(access != "")})
			}
			entries, err := readEntries(c)
			var got *vfconfig.Config
			if err == nil {
				got, err = configFor(entries, a.Devices.Results[0], Target{Resource: mayAll(t)})
			}
			says := ""
			if err != nil {
				says = err.Error()
			}
			if diff := cmp.Diff(test.want, got); diff != "" || says != test.says {
				t.Errorf("got %q, want %q\n%s", says, test.says, diff)
			}
		})
	}
}

// setRequests sets the requests of a claim, each by the names of request and class, such as "vf fast" or "vf/a fast".
func setRequests(c *resourceapi.ResourceClaim, list ...string) {
	for _, r := range list {
		name, class, _ := strings.Cut(r, " ")
		name, sub, isSub := strings.Cut(name, "/")
		request := resourceapi.DeviceRequest{Name: name, Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class}}
		if isSub {
			request = resourceapi.DeviceRequest{Name: name, FirstAvailable: []resourceapi.DeviceSubRequest{{Name: "no", DeviceClassName: "no"},
				{Name: sub, DeviceClassName: class}}}
		}
		c.Spec.Devices.Requests = append(c.Spec.Devices.Requests, request)
	}
}

// TestCheckConfig checks config entries that apply to no device, and class entries whose class is ambiguous.
func TestCheckConfig(t *testing.T) {
	const unknown = "class fast or slow: status.allocation.devices.config[0].opaque.parameters: before Kubernetes 1.35 an entry does not show which of the classes fast, slow it belongs to: " +
		"name the resource in the parameters of the classes, as 'podlace sriov classes' does"
	one, two := []string{"vf fast"}, []string{"vf fast", "other slow"}
	for _, test := range []struct {
		name     string
		requests []string
		configs  configs
		warnings []string
		says     string
	}{
		{name: "none", requests: one},
		{name: "all are used", requests: two, configs: configs{fromClass(`"vlan":5`, "vf"), fromClaim(`"mtu":1400`, "other"), fromClaim("")}},
		{name: "of another driver", requests: one, configs: configs{foreignEntry("FromClaim", "gpu.example.com", "{", "x")}},
		{name: "a claim's for no request", requests: one, configs: configs{fromClaim(`"mtu":1400`, "vg", "other")},
			says: "config[0].opaque.parameters applies to no device of the claim (requests vg, other)"},
		{name: "a claim's for no resource", requests: one, configs: configs{fromClaim(`"resource":"example.com/slow","mtu":1400`)},
			says: "config[0].opaque.parameters applies to no device of the claim (resource example.com/slow)"},
		{name: "a claim's for an alternative that was not taken", requests: []string{"vf/a fast"},
			configs: configs{fromClaim(`"resource":"example.com/slow","mtu":1400`, "vf"), fromClaim(`"resource":"example.com/slow","mtu":1400`)}},
		{name: "a class's for no device", requests: one, configs: configs{fromClass(`"resource":"example.com/slow","mtu":1400`, "vf")},
			warnings: []string{"class fast: config[0].opaque.parameters applies to no device of the claim (requests vf, resource example.com/slow)"}},
		{name: "a claim's for admin access", requests: []string{"watch fast", "vf fast"}, configs: configs{fromClaim(`"mtu":1400`, "watch")},
			says: "config[0].opaque.parameters applies only to devices with adminAccess, which get no settings (requests watch)"},
		{name: "a claim's for admin access and a VF", requests: []string{"watch fast", "vf fast"}, configs: configs{fromClaim(`"mtu":1400`)}},
		{name: "a class's for admin access", requests: []string{"watch fast"}, configs: configs{fromClass(`"mtu":1400`)}},
		{name: "a typing error", requests: two, configs: configs{fromClass(`"vlann":5`, "other")},
			says: "class slow: config[0].opaque.parameters.vlann: unknown key; did you mean vlan?"},
		{name: "a typing error in the third entry of a class", requests: two, configs: configs{fromClass(`"vlan":5`, "vf"),
			foreignEntry("FromClass", "gpu.example.com", "{", "other"), fromClass(`"vlan":5`, "other"), fromClass(`"vlann":5`, "other")},
			says: "class slow: config[2].opaque.parameters.vlann: unknown key; did you mean vlan?"},
		{name: "a typing error in one of two classes", requests: two, configs: configs{fromClass(`"vlan":5`), fromClass(`"vlann":5`)},
			says: "class fast or slow: status.allocation.devices.config[1].opaque.parameters.vlann: unknown key; did you mean vlan?"},
		{name: "one MAC for two VFs of a request", requests: []string{"vf fast", "vf fast"},
			configs: configs{fromClaim(`"mac":"02:00:00:00:00:01"`)},
			says:    `config[0].opaque.parameters.mac: "02:00:00:00:00:01": only one device can have it, but the entry applies to several devices`},
		{name: "one address for two VFs of a request", requests: []string{"vf fast", "vf fast"},
			configs: configs{fromClass(`"ips":["10.0.0.1"]`)},
			says:    `class fast: config[0].opaque.parameters.ips: ["10.0.0.1"]: only one device can have it, but the entry applies to several devices`},
		{name: "one MAC for two requests", requests: two, configs: configs{fromClass(`"mtu":1400`, "vf"), fromClaim(`"mac":"02:00:00:00:00:01"`)},
			says: `config[0].opaque.parameters.mac: "02:00:00:00:00:01": only one device can have it, but the entry applies to several devices`},
		{name: "one name for two requests", requests: two, configs: configs{fromClaim(`"ifName":"data"`)},
			says: `config[0].opaque.parameters.ifName: "data": only one device can have it, but the entry applies to several devices`},
		{name: "numbered names", requests: two, configs: configs{fromClaim(`"ifName":"data{index}"`)}},
		{name: "one MAC, overridden for a request", requests: two,
			configs: configs{fromClaim(`"mac":"02:00:00:00:00:01"`), fromClaim(`"mac":"02:00:00:00:00:02"`, "other")}},
		// The following class entries contain no requests. Kubernetes before 1.35 writes class entries in this way.
		{name: "one class with two entries", requests: []string{"vf fast", "other fast"},
			configs: configs{fromClass(`"vlan":5`), fromClass(`"mtu":1400`)}},
		{name: "two classes that differ", requests: two, configs: configs{fromClass(`"vlan":5`), fromClass(`"vlan":6`)}, says: unknown},
		{name: "two classes, one entry", requests: two, configs: configs{fromClass(`"vlan":5`)}, says: unknown},
		{name: "two classes of subrequests", requests: []string{"vf/a fast", "other slow"}, configs: configs{fromClass(`"vlan":5`)},
			says: unknown},
		{name: "two classes that agree", requests: two, configs: configs{fromClass(`"vlan":5`), fromClass(`"vlan":5`)}},
		{name: "two classes with their resource", requests: two, configs: configs{fromClass(`"vlan":5,"resource":"example.com/fast"`),
			fromClass(`"vlan":6,"resource":"example.com/fast"`)}},
		{name: "two classes with their requests", requests: two, configs: configs{fromClass(`"vlan":5`, "vf"), fromClass(`"vlan":6`, "other")}},
		{name: "another driver's class", requests: []string{"vf fast", "gpu big"}, configs: configs{fromClass(`"vlan":5`)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, devices := claimWith(test.requests, test.configs)
			entries, err := readEntries(c)
			var warnings []string
			if err == nil {
				warnings, err = checkConfig(c, entries, devices)
			}
			says := ""
			if err != nil {
				says = err.Error()
			}
			if diff := cmp.Diff(test.warnings, warnings); diff != "" || says != test.says {
				t.Errorf("got %q, want %q\n%s", says, test.says, diff)
			}
		})
	}
}

// claimWith returns an allocated claim with one device for each request "NAME CLASS", and this driver's devices. "watch" has admin
// access, and the device of "gpu" belongs to another driver.
func claimWith(requests []string, entries configs) (*resourceapi.ResourceClaim, []poddevices.Device) {
	c := newClaim("c-1", "web")
	setRequests(c, requests...)
	c.Status.Allocation.Devices.Config = entries
	var devices []poddevices.Device
	for i, r := range requests {
		name, _, _ := strings.Cut(r, " ")
		result := resourceapi.DeviceRequestAllocationResult{Request: name, Driver: claim.Driver, AdminAccess: new(name == "watch")}
		if name == "gpu" {
			result.Driver = "gpu.example.com"
		} else {
			devices = append(devices, poddevices.Device{Resource: "example.com/fast", Claim: &poddevices.Claim{Result: i}})
		}
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, result)
	}
	return c, devices
}

// TestPrepareConfig checks that the record has the settings of class and claim, and that Prepare refuses a claim with wrong settings
// without writing a file.
func TestPrepareConfig(t *testing.T) {
	l := newDRALab(t)
	l.updateInventory(*mayAll(t), nil)
	l.runDriver()
	k := l.register(false)
	for i, test := range []struct {
		configs configs
		says    string
	}{
		{configs{fromClaim(`"vlann":1`)}, ": config[0].opaque.parameters.vlann: unknown key; did you mean vlan?"},
		{configs{fromClaim(`"vlan":7`)}, ": request a: config[0].opaque.parameters.vlan 7: claims may set 100-199,300 of resource example.com/fast"},
		{configs{fromClass(`"mtu":1400`), fromClaim(`"mtu":1400`), fromClaim(`"vlan":7`)},
			": request a: config[1].opaque.parameters.vlan 7: claims may set 100-199,300 of resource example.com/fast"},
		{configs{fromClass(`"mtu":1400`), fromClass(`"mtuu":1400`)}, ": class fast: config[1].opaque.parameters.mtuu: unknown key; did you mean mtu?"},
		{configs{fromClaim(`"ifName":"eth0"`)}, `: config[0].opaque.parameters.ifName: "eth0": every pod already has an interface of this name`},
		{configs{fromClaim(`"mtu":1400`, "b")}, ": config[0].opaque.parameters applies to no device of the claim (requests b)"},
	} {
		name := fmt.Sprint("web-", i)
		c := newClaim(name, name, deviceResult("a", vf1))
		setRequests(c, "a fast")
		c.Status.Allocation.Devices.Config = test.configs
		l.addClaims(c)
		if got := k.prepareClaims(c); len(got) != 1 || !strings.Contains(got[0], "claim shop/"+name+test.says) || l.fileNames(l.options.Claims) != "" {
			t.Errorf("got %q, want %q; records %s", got, test.says, l.fileNames(l.options.Claims))
		}
	}
	c := newClaim("c-1", "ok", deviceResult("a", vf0))
	c.Status.Allocation.Devices.Config = configs{fromClass(`"vlan":5`), fromClaim(`"mtu":1400`)}
	l.addClaims(c)
	k.prepareClaims(c)
	r, err := claim.Read(l.options.Claims, "c-1")
	want := &vfconfig.Config{VLAN: new(5), MTU: new(1400), Claimed: []string{"mtu"}}
	if diff := cmp.Diff(want, r.Devices[0].Config); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
}

// TestPathInClaim: the scheduler drops entries for alternatives that it did not choose. An error must nevertheless have the entry's
// index in the claim's specification.
func TestPathInClaim(t *testing.T) {
	c := newClaim("c-1", "web", deviceResult("vf/b", vf0))
	setRequests(c, "vf/b fast")
	c.Status.Allocation.Devices.Config = configs{fromClass(`"vlan":5`), fromClaim(`"mtu":1400`), fromClaim(`"mtu":12`, "vf/b")}
	list := configs{fromClaim(`"mtu":1500`, "vf/a"), fromClaim(`"mtu":1400`), fromClaim(`"mtu":1500`, "vf/a"), fromClaim(`"mtu":12`, "vf/b")}
	for _, e := range list {
		c.Spec.Devices.Config = append(c.Spec.Devices.Config, resourceapi.DeviceClaimConfiguration{Requests: e.Requests,
			DeviceConfiguration: e.DeviceConfiguration})
	}
	const want = "config[3].opaque.parameters.mtu: 12: want 68-65535"
	if _, err := readEntries(c); err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}
