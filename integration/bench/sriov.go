// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/card"
	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/sandbox"
	"github.com/podlace/podlace/pkg/store"
	"golang.org/x/sys/unix"
)

const (
	groupSRIOV     = "sriov"
	nothingPackage = "github.com/podlace/podlace/integration/bench/nothing"

	// What the plugin may take above one that does nothing, in milliseconds, and an ADD with a VF in units of the bare calls.
	answeredBar, unansweredBar = 2.0, 6.0
	vfBar                      = 1.3

	podWithVF = "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0" // as package card has it
	plainPod  = "IgnoreUnknown=1;K8S_POD_NAMESPACE=bench;K8S_POD_NAME=plain"
	podUID    = "0b2c8a9e-5d0e-4f5e-8d0c-000000000001"

	besideNothing, besideDaemon, besideKubelet = "nothing", "daemon", "kubelet"
)

// stage is what tests give to package card: a panic ends the measurement, and end undoes what was set up.
type stage struct {
	testing.TB
	folder string
	ends   []func()
}

func (s *stage) Helper()                   {}
func (s *stage) Name() string              { return groupSRIOV }
func (s *stage) Cleanup(f func())          { s.ends = append(s.ends, f) }
func (s *stage) Error(args ...any)         { panic(fmt.Sprint(args...)) }
func (s *stage) Fatal(args ...any)         { panic(fmt.Sprint(args...)) }
func (s *stage) Errorf(f string, a ...any) { panic(fmt.Sprintf(f, a...)) }
func (s *stage) Fatalf(f string, a ...any) { panic(fmt.Sprintf(f, a...)) }

func (s *stage) TempDir() string {
	dir, err := os.MkdirTemp(s.folder, "card")
	if err != nil {
		panic(err)
	}
	return dir
}

// do calls f, which may call t.Fatal.
func (s *stage) do(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	return f()
}

func (s *stage) end() error {
	return s.do(func() error {
		for len(s.ends) > 0 {
			last := s.ends[len(s.ends)-1]
			s.ends = s.ends[:len(s.ends)-1]
			last()
		}
		return nil
	})
}

// measureSRIOV takes veths for VFs: the kernel moves them as it does interfaces of cards.
func measureSRIOV(r *report, o *options, n nodes, temporary string) {
	r.buildFloorsOnce(o, temporary)
	if err := n.measureSRIOV(r, *o, temporary); err != nil {
		r.fail(groupSRIOV, err)
	}
}

func (n nodes) measureSRIOV(r *report, o options, temporary string) (err error) {
	if err := build("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(temporary, "nothing"), nothingPackage); err != nil {
		return err
	}
	node, err := n.open("node-sriov")
	if err != nil {
		return err
	}
	s := &stage{folder: temporary}
	defer func() { err = errors.Join(err, node.Do(s.end)) }()
	err = node.Do(func() error { return s.do(func() error { card.New(s, 1); return nil }) })
	if err != nil {
		return err
	}
	kubelet, err := serveKubelet(s)
	if err != nil {
		return err
	}
	if err := n.measureWithoutVF(r, o, node, temporary, kubelet); err != nil {
		return err
	}
	if err := n.measureVF(r, o, node); err != nil {
		return err
	}
	return measureJournal(r, o)
}

// asker is the plugin in the place of one that does nothing, for a pod of which somebody has to be asked.
type asker struct {
	*chain
	args string
}

func (a asker) run(verb string, exec runner) error {
	return a.chain.run(verb, func(inv invocation) ([]byte, error) {
		inv.env = append(inv.env, "CNI_ARGS="+a.args) // the last one counts
		return exec(inv)
	})
}

// afterOthers is the configuration of a plugin behind one that has connected the pod.
func afterOthers(kind string, pod *sandbox.Pod, kubelet string) pluginConf {
	return pluginConf{"type": kind, "resources": []string{card.Resource}, "kubeletDir": kubelet, "prevResult": map[string]any{"cniVersion": cniVersion,
		"interfaces": []any{map[string]string{"name": "veth0"}, map[string]string{"name": podInterface, "sandbox": pod.Path}},
		"ips":        []any{map[string]any{"address": "10.58.0.2/16", "gateway": "10.58.0.1", "interface": 1}}}}
}

// measureWithoutVF is a pod that was allocated no VF: nearly all pods of a node. The device plugin is the real one.
func (n nodes) measureWithoutVF(r *report, o options, node *sandbox.Pod, temporary, kubelet string) (err error) {
	const away = allocation.Socket + ".away" // the card answers for pods with VFs
	if err := os.Rename(allocation.Socket, away); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Rename(away, allocation.Socket)) }()
	for _, what := range []string{besideDaemon, besideKubelet} {
		entries := map[string]*entry{}
		var all []*entry
		for _, kind := range []string{besideNothing, what} {
			side, program := side{sideOurs, o.plugins}, "sriov"
			if kind == besideNothing {
				side.folder, program = temporary, "nothing"
			}
			c, err := n.chainOf("sriov-"+kind+what, "node-sriov", side)
			if err != nil {
				return err
			}
			c.plugins = []pluginConf{afterOthers(program, c.pod, kubelet)}
			entries[kind] = newEntry(kind, asker{c, plainPod + ";K8S_POD_UID=" + podUID})
			all = append(all, entries[kind])
		}
		stop := func() error { return nil }
		if what == besideDaemon {
			err := node.Do(func() (err error) { stop, err = startDevicePlugin(o.plugins, temporary, kubelet); return err })
			if err != nil {
				return err
			}
		}
		race(all, 2*o.rounds) // the differences are small
		err := stop()
		for _, e := range all {
			err = errors.Join(err, e.err)
		}
		if err != nil {
			return fmt.Errorf("pod without VF, %s: %w", what, err)
		}
		for _, verb := range []string{verbAdd, verbDel} {
			idle := p50(entries[besideNothing].samples[verb].chain)
			f := figure{Value: p50(entries[what].samples[verb].chain) - idle}
			title := map[string]string{besideDaemon: "with the device plugin", besideKubelet: "without the device plugin, the kubelet answers"}[what]
			r.addAbsolute(fmt.Sprintf("pod without VF, %s: sriov %s above the %.1f ms of a plugin that does nothing", title, verb, idle),
				map[string]float64{besideDaemon: answeredBar, besideKubelet: unansweredBar}[what], map[string]figure{sideOurs: f})
		}
	}
	return nil
}

// startDevicePlugin returns when the device plugin answers that the pod has no device.
func startDevicePlugin(plugins, temporary, kubelet string) (stop func() error, err error) {
	config := filepath.Join(temporary, "sriov.json")
	if err := os.WriteFile(config, []byte(`{"resourceList": [{"resourceName": "other", "selectors": {"pfNames": ["none"]}}]}`), 0o600); err != nil {
		return nil, err
	}
	var said bytes.Buffer
	cmd := exec.Command(filepath.Join(plugins, "sriov-device-plugin"), "--config-file", config, "--kubelet-dir", kubelet, "--device-plugin-dir",
		filepath.Join(kubelet, "device-plugins"), "--registration", "classic", "--http", "", "--cdi-dir", "", "--device-info-dir", "")
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stop = func() error {
		_ = cmd.Process.Kill() // it may have ended by itself
		_ = cmd.Wait()
		return os.Remove(allocation.Socket)
	}
	for until := time.Now().Add(10 * time.Second); time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
		var a allocation.Answer
		a, err = allocation.Ask(allocation.Socket, until, allocation.Question{Namespace: "bench", Pod: "plain", UID: podUID, Resources: []string{card.Resource}})
		if err == nil && a.UID == podUID {
			return stop, nil
		}
	}
	return nil, errors.Join(fmt.Errorf("the device plugin does not answer:\n%s", &said), err, stop())
}

// measureVF is a pod with one VF without settings and without IPAM.
func (n nodes) measureVF(r *report, o options, node *sandbox.Pod) error {
	c, err := n.chainOf("sriov-vf", "node-sriov", side{sideOurs, o.plugins})
	if err != nil {
		return err
	}
	c.plugins = []pluginConf{afterOthers("sriov", c.pod, "/nonexistent")}
	ours := newEntry(sideOurs, asker{c, podWithVF})
	all := []*entry{ours}
	var floor *entry
	if o.floorGo != "" {
		pod, err := n.open("floor-vf")
		if err != nil {
			return err
		}
		index, err := indexOf(node, card.Name(floorVF))
		if err != nil {
			return err
		}
		floor = newEntry(sideFloorGo, vfFloor{o.floorGo, node, pod, index})
		all = append(all, floor)
	}
	race(all, o.rounds)
	for _, e := range all {
		if e.err != nil {
			return fmt.Errorf("pod with a VF, %s: %w", e.side, e.err)
		}
	}
	for _, verb := range []string{verbAdd, verbCheck, verbDel} {
		f, bar := figure{Value: p50(ours.samples[verb].chain)}, 0.0
		if floor != nil {
			f.Base = p50(floor.samples[verb].chain)
		}
		if verb == verbAdd {
			bar = vfBar
		}
		r.addGrowth("pod with one VF, sriov "+verb+", against the bare calls", bar, map[string]figure{sideOurs: f})
	}
	return nil
}

func indexOf(node *sandbox.Pod, link string) (index uint32, err error) {
	err = node.Do(func() error {
		found, err := net.InterfaceByName(link)
		if err == nil {
			index = uint32(found.Index)
		}
		return err
	})
	return index, err
}

// vfFloor makes the calls that the kernel must see for a VF in the same order, and nothing else.
type vfFloor struct {
	program   string
	node, pod *sandbox.Pod
	index     uint32 // of the VF
}

func (f vfFloor) run(verb string, exec runner) error {
	s := map[string]func() script{verbAdd: f.add, verbCheck: f.check, verbDel: f.del}[verb]()
	s.step(opPrint, 0, []byte("{}"))
	return f.node.Do(func() error {
		_, err := exec(invocation{name: "sriov", path: f.program, stdin: s})
		return err
	})
}

const floorVF, floorNet = 1, "net1" // the other one is for the plugin

// about is a message about the VF, which has its index in either namespace.
func (f vfFloor) about(kind uint16, up bool) *message {
	return newMessage(kind, unix.NLM_F_ACK, linkHeader(f.index, up))
}

// down takes it down: the flag is not set, and ifi_change names it.
func (f vfFloor) down() *message {
	m := f.about(unix.RTM_NEWLINK, true)
	m.body[8] &^= unix.IFF_UP
	return m
}

// move sends it to the namespace that is descriptor 100.
func (f vfFloor) move(name string) *message {
	return f.about(unix.RTM_SETLINK, false).attr(unix.IFLA_NET_NS_FD, native32(netnsFD)).attr(unix.IFLA_IFNAME, text(name))
}

// other adds its alternative name, or takes it away.
func (f vfFloor) other(kind uint16) *message {
	return f.about(kind, false).nest(unix.IFLA_PROP_LIST, attr(unix.IFLA_ALT_IFNAME, text("alt-"+card.Name(floorVF))))
}

func (f vfFloor) add() (s script) {
	const inet, conf, arpNotify = unix.AF_INET, 1, 22 // IFLA_INET_CONF, IPV4_DEVCONF_ARP_NOTIFY
	s.step(opNetns, 0, []byte(f.pod.Path))
	s.step(opSocket, unix.NETLINK_ROUTE, nil)
	s.send(f.about(unix.RTM_GETLINK, false))
	s.send(f.other(unix.RTM_DELLINKPROP))
	s.send(f.move(floorNet))
	s.step(opEnter, 0, nil)
	s.step(opSocket, unix.NETLINK_ROUTE, nil)
	s.send(f.about(unix.RTM_GETLINK, false))
	s.send(f.about(unix.RTM_NEWLINK, false).nest(unix.IFLA_AF_SPEC, nest(inet, nest(conf, attr(arpNotify, native32(1))))))
	s.send(f.about(unix.RTM_NEWLINK, true))
	return s
}

func (f vfFloor) check() (s script) {
	s.step(opNetns, 0, []byte(f.pod.Path))
	s.step(opEnter, 0, nil)
	s.step(opSocket, unix.NETLINK_ROUTE, nil)
	s.send(f.about(unix.RTM_GETLINK, false))
	return s
}

func (f vfFloor) del() (s script) {
	s.step(opNetns, 0, []byte(f.pod.Path))
	s.step(opEnter, 0, nil)
	s.step(opNetns, 0, []byte(f.node.Path))
	s.step(opSocket, unix.NETLINK_ROUTE, nil)
	s.send(f.about(unix.RTM_GETLINK, false))
	s.send(f.down())
	s.send(f.move(card.Name(floorVF)))
	s.step(opEnter, 0, nil)
	s.step(opSocket, unix.NETLINK_ROUTE, nil)
	s.send(f.about(unix.RTM_GETLINK, false))
	s.send(f.other(unix.RTM_NEWLINKPROP))
	return s
}

// measureJournal is what of an ADD the journal costs here, where /run is in memory. On a disk it is what the disk takes for two syncs.
func measureJournal(r *report, o options) error {
	dir, err := store.Make(filepath.Join(store.Root, ".bench"), 0o700)
	if err != nil {
		return err
	}
	defer dir.Close()
	var samples []time.Duration
	for range o.rounds {
		start := time.Now()
		if err := dir.WriteSync("journal", make([]byte, 600), 0o600); err != nil {
			return err
		}
		samples = append(samples, time.Since(start))
	}
	f := figure{Value: p50(samples)}
	f.Note = fmt.Sprintf("%.2f", f.Value)
	r.Loads = append(r.Loads, figureRow{What: "of ADD with a VF, the journal, written and synced, /run in memory", Sides: map[string]figure{sideOurs: f}})
	return errors.Join(dir.Remove("journal"), os.Remove(dir.Path()))
}
