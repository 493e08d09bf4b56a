// SPDX-License-Identifier: Apache-2.0

// Package sriov attaches SR-IOV virtual functions (VFs) to pods: those that the kubelet allocated, or the one whose address Multus
// passes. They are additional interfaces if an earlier plugin in the chain created the main one; otherwise, the first VF is the main
// interface.
//
// The next pod may get the same VF. ADD therefore saves its settings to a journal before the first change, and DEL restores them even after
// a crash or a change by the pod.
package sriov

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/store"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// attachmentState is the content of an attachment's record. Without VFs, there is none.
type attachmentState struct {
	VFs        []vf            `json:"vfs"`
	Chained    bool            `json:"chained,omitempty"`
	Unfinished bool            `json:"unfinished,omitempty"` // ADD has not finished
	IPAM       json.RawMessage `json:"ipam,omitempty"`       // ipam object of the configuration, which may be changed before DEL
}

// vf is a VF of an attachment, with the values that it got from ADD.
type vf struct {
	Address   pci.Address      `json:"address"`
	Name      string           `json:"name"`               // interface name in the pod
	Default   string           `json:"-"`                  // interface name by the configuration
	Fixed     net.HardwareAddr `json:"fixedMAC,omitempty"` // MAC required by the configuration or the pod
	IPs       []string         `json:"ips,omitempty"`      // addresses that the pod requires from the IPAM plugin
	MAC       string           `json:"mac,omitempty"`
	MTU       int              `json:"mtu,omitempty"`
	Userspace string           `json:"userspace,omitempty"` // driver that passes the VF to a user space program, such as vfio-pci; there is no interface
	Leased    bool             `json:"leased,omitempty"`    // the VF may have leased addresses from the IPAM plugin
	Addresses []netip.Prefix   `json:"addresses,omitempty"`
	Routes    []kernel.Route   `json:"routes,omitempty"`

	Claim  *poddevices.Claim `json:"claim,omitempty"` // claim that assigned the VF
	Wanted vfconfig.Config   `json:"wanted,omitzero"` // of the configuration, the class and the claim

	formerMAC  net.HardwareAddr // of the interface before Prepare or ADD changed the driver; nil if unknown
	config     *vfconfig.Config // settings of the claim and its class; nil if there are none
	journaled  bool             // this process has written the journal
	dadLink    kernel.Link      // interface in IPv6 duplicate address detection; Index is 0 for none
	ips        *ipam.Plan
	ipamResult *types100.Result
}

type sriov struct {
	ipam   ipam.Runner
	sysfs  string
	socket string // unix socket of the device plugin
	claims string // folder of claim records
}

// Plugin returns the sriov plugin. builtin are the IPAM plugins that run in its process.
func Plugin(builtin ...plugin.Plugin) plugin.Plugin {
	return PluginAt(pci.Sysfs, poddevices.Socket, claim.Folder, builtin...)
}

// PluginAt returns the sriov plugin for other paths of sysfs, the device plugin's socket and the folder of claim records.
func PluginAt(sysfs, socket, claims string, builtin ...plugin.Plugin) plugin.Plugin {
	return sriov{ipam.Runner{Builtin: builtin}, sysfs, socket, claims}.plugin()
}

func (s sriov) plugin() plugin.Plugin {
	return plugin.Plugin{Name: "sriov", DefersSignals: true, Add: s.add, Del: s.del, Check: s.check, GC: s.gc, Status: s.status}
}

// requestJob is the configuration, the namespaces and the attachment of one ADD or CHECK.
type requestJob struct {
	nodeSide
	cfg requestConfig
	att *attachment.Attachment
	pod *kernel.NS
	st  attachmentState
}

func (s sriov) open(r *plugin.Request, cfg requestConfig) (_ *requestJob, err error) {
	r.DeferSignalsSoon()
	n, err := openNode(s.sysfs, r)
	if err != nil {
		return nil, err
	}
	j := &requestJob{nodeSide: *n, cfg: cfg}
	defer func() {
		if err != nil {
			j.close()
		}
	}()
	if j.att, err = attachment.Open(r); err != nil {
		return nil, err
	}
	r.LockFile = j.att.LockFile()
	if j.pod, err = kernel.Open(r.Netns); err != nil {
		return nil, err
	}
	r.DeferSignals()
	return j, nil
}

func (j *requestJob) close() {
	j.att.Close()
	j.host.Close()
	if j.pod != nil {
		j.pod.Close()
	}
}

func (s sriov) add(r *plugin.Request) (result *types100.Result, err error) {
	cfg, err := parseConfig(r)
	if err != nil {
		return nil, err
	}
	vfs, err := s.wantedVFs(r, cfg)
	if err != nil {
		return nil, err
	}
	if len(vfs) == 0 {
		return nil, nil
	}
	go func() { // build the JSON encoders while the kernel opens the pod
		_, _ = json.Marshal(attachmentState{})
		_, _ = json.Marshal(Holding{})
	}()
	j, err := s.open(r, cfg)
	if err != nil {
		return nil, err
	}
	defer j.close()
	if err := s.clearResidue(j, vfs); err != nil {
		return nil, err
	}
	j.st = attachmentState{VFs: vfs, Chained: isChained(r), Unfinished: true}
	if cfg.IPAM != "" {
		j.st.IPAM = ipam.Object(r.Config)
	}
	if err := j.savePlan(); err != nil {
		return nil, err
	}
	var undo plugin.Undo
	defer undo.OnError(&err)
	undo.Push(func() error {
		touched := j.st
		touched.VFs = slices.DeleteFunc(slices.Clone(j.st.VFs), func(v vf) bool { return !v.journaled })
		return s.removeAttachment(&j.nodeSide, j.att, touched)
	})
	for i := range j.st.VFs {
		if err := s.attach(j, &j.st.VFs[i]); err != nil {
			return nil, err
		}
	}
	if err := j.awaitDAD(); err != nil {
		return nil, err
	}
	j.st.Unfinished = false
	if err := j.att.Save(j.st); err != nil {
		return nil, err
	}
	return j.cniResult(), nil
}

// savePlan writes the record before the first change of the system. With an IPAM plugin, it already marks each VF as leased, so that
// DEL releases the addresses even if ADD is killed.
func (j *requestJob) savePlan() error {
	planned := j.st
	planned.VFs = slices.Clone(j.st.VFs)
	for i := range planned.VFs {
		planned.VFs[i].Leased = j.cfg.IPAM != ""
	}
	return j.att.Save(planned)
}

// clearResidue removes what an interrupted ADD with the same key left. It returns an error if the pod already has an interface with a
// planned name.
func (s sriov) clearResidue(j *requestJob, vfs []vf) error {
	var st attachmentState
	recorded, err := j.att.Load(&st)
	if err != nil {
		return err
	}
	if recorded && st.Unfinished { // this process has the lock, so the interrupted process has ended
		j.r.Log.Info("removing the residue of an interrupted ADD")
		if err := s.removeAttachment(&j.nodeSide, j.att, st); err != nil {
			return err
		}
		recorded = false
	}
	for _, v := range vfs {
		if _, exists, err := j.pod.Link(v.Name); err != nil {
			return err
		} else if exists {
			hint := "it is unchanged; another plugin made it"
			if recorded {
				hint = "it is unchanged; an earlier ADD made it: call DEL first"
			}
			return plugin.WithHint(plugin.Errorf(plugin.CodeAddressTaken, "interface %s already exists in the pod", v.Name), "%s", hint)
		}
	}
	if !recorded {
		return nil
	}
	for _, v := range st.VFs {
		if _, exists, err := j.pod.Link(v.Name); err != nil {
			return err
		} else if exists || v.Userspace != "" {
			return plugin.WithHint(plugin.Errorf(plugin.CodeAddressTaken, "the pod already has VF %s as %s", v.Address, v.Name),
				"an earlier ADD attached it: call DEL first. If the conflist has the type sriov twice, name all resources in one entry")
		}
	}
	return s.removeAttachment(&j.nodeSide, j.att, st)
}

func (s sriov) del(r *plugin.Request) error {
	att, st, recorded, err := attachment.Take[attachmentState](r)
	if err != nil {
		return err
	}
	defer att.Close()
	if recorded {
		return s.removeFromNode(r, att, st)
	}
	return errors.Join(s.delUnrecorded(r, att), att.Remove())
}

func (s sriov) removeFromNode(r *plugin.Request, att *attachment.Attachment, st attachmentState) error {
	r.DeferSignals()
	r.LockFile = att.LockFile()
	n, err := openNode(s.sysfs, r)
	if err != nil {
		return err
	}
	defer n.host.Close()
	return s.removeAttachment(n, att, st)
}

// removeAttachment restores all VFs of an attachment, continuing after an error. Once all are restored, it releases the addresses and
// then removes the record.
func (s sriov) removeAttachment(n *nodeSide, att *attachment.Attachment, st attachmentState) error {
	var errs []error
	for _, v := range slices.Backward(st.VFs) {
		ok, err := n.releaseVF(att.Key, v.Address)
		if err == nil && !ok && !st.Unfinished { // a killed ADD has journals only of the VFs that it reached
			n.r.Log.Warn("the VF has no journal, so it keeps the pod's settings unless they were restored earlier: run 'podlace sriov reset "+
				v.Address.String()+"' when no pod has the VF", "vf", v.Address)
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, v := range slices.Backward(st.VFs) {
		if v.Leased {
			errs = append(errs, s.releaseAddresses(n.r, st, v))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return att.Remove()
}

// delUnrecorded restores the VFs of an attachment by their journals alone. ADD writes the record first, so only another program can
// have removed it.
func (s sriov) delUnrecorded(r *plugin.Request, att *attachment.Attachment) error {
	if !mayHaveVFs(r) {
		return nil
	}
	left, err := journalsOf(attachment.KeyOf(r))
	if err != nil || len(left) == 0 {
		return err
	}
	st := attachmentState{Chained: left[0].Chained, IPAM: ipam.Object(r.Config)}
	for _, j := range left {
		st.VFs = append(st.VFs, vf{Address: j.Address, Name: j.Name, Leased: ipam.Type(st.IPAM) != ""})
	}
	r.Log.Warn("the record of the attachment is missing; restoring its VFs from their journals")
	if att == nil { // the network has no records
		if att, err = attachment.Open(r); err != nil {
			return err
		}
		defer att.Close()
	}
	return s.removeFromNode(r, att, st)
}

// mayHaveVFs reports whether an attachment without a record may have VFs. To find them, the caller must read the journals of all attached
// VFs of the node. To save this, it returns false if prevResult has only the interface of an earlier plugin, because it would also have
// those of VFs.
func mayHaveVFs(r *plugin.Request) bool {
	return !isChained(r) || len(r.Prev.Interfaces) == 0 ||
		slices.ContainsFunc(r.Prev.Interfaces, func(i *types100.Interface) bool { return i.Sandbox != "" && i.Name != r.IfName })
}

// STATUS fails only if every ADD would fail on this node, and not if there are no VFs, because pods without VFs can run there.
func (s sriov) status(r *plugin.Request) error {
	cfg, err := parseConfig(r)
	if err != nil {
		return err
	}
	if err := errors.Join(attachment.Writable(r.Network), store.Writable(JournalFolder)); err != nil {
		return plugin.Errorf(plugin.CodeNotAvailable, "%w", err)
	}
	attachment.LogOnce(r, kubeletFindings(cfg))
	if cfg.IPAM != "" {
		return s.ipam.Status(s.ipamRequest(r, false, vf{Name: r.IfName}), cfg.IPAM)
	}
	return nil
}

// kubeletFindings warns if kubeletDir is not the root folder of a kubelet. This is no error, because the runtime may start before the
// kubelet.
func kubeletFindings(cfg requestConfig) []plugin.Finding {
	sockets := filepath.Join(cfg.Kubelet, "pod-resources")
	if _, err := os.Stat(sockets); cfg.Device.IsValid() || !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return []plugin.Finding{{Key: "kubeletDir", Code: plugin.NoKubelet,
		Text: "no kubelet has its root folder at " + cfg.Kubelet + ", since " + sockets +
			" does not exist: pods with VFs cannot start. Set kubeletDir to the --root-dir of the kubelet"}}
}

// cniResult returns the result of the earlier plugins with the VFs added.
func (j *requestJob) cniResult() *types100.Result {
	result := &types100.Result{}
	if j.r.Prev != nil {
		result = j.r.Prev
	}
	for _, v := range j.st.VFs {
		index := len(result.Interfaces)
		result.Interfaces = append(result.Interfaces,
			&types100.Interface{Name: v.Name, Mac: v.MAC, Mtu: v.MTU, Sandbox: j.r.NetnsPath, PciID: v.Address.String()})
		if v.ips == nil || !j.cfg.ReportIPs {
			continue
		}
		for _, ip := range v.ips.IPs {
			ip.Interface = types100.Int(index)
			result.IPs = append(result.IPs, ip)
		}
		result.Routes = append(result.Routes, v.ips.Shown...)
		if result.DNS.IsEmpty() {
			result.DNS = v.ipamResult.DNS
		}
	}
	return result
}
