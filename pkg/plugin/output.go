// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
)

// encode encodes a result in the version of the configuration. A nil result stands for prevResult.
func (r *Request) encode(result *types100.Result) ([]byte, error) {
	if result != nil {
		return encodeResult(result, r.CNIVersion)
	}
	if r.prev != nil {
		return r.prev, nil
	}
	if r.Prev == nil {
		return nil, Errorf(CodeInternal, "neither a result nor a prevResult")
	}
	return encodeResult(r.Prev, r.CNIVersion)
}

// encodeResult encodes a result in the format of the cniVersion v.
func encodeResult(result *types100.Result, v string) ([]byte, error) {
	result.CNIVersion = types100.ImplementedSpecVersion
	if v != types100.ImplementedSpecVersion {
		dropNewFields(result)
	}
	converted, err := result.GetAsVersion(v)
	if err != nil {
		return nil, Errorf(CodeVersion, "the result cannot be expressed in cniVersion %s: %w", v, err)
	}
	return json.MarshalIndent(converted, "", "    ")
}

// dropNewFields removes the fields that exist only in version 1.1.0, which the library that converts results keeps.
func dropNewFields(result *types100.Result) {
	for _, i := range result.Interfaces {
		i.Mtu, i.SocketPath, i.PciID = 0, "", ""
	}
	routes := make([]*types.Route, len(result.Routes))
	for i, r := range result.Routes {
		routes[i] = &types.Route{Dst: r.Dst, GW: r.GW}
	}
	result.Routes = routes
}

// versionJSON returns the output of VERSION, with the cniVersion of the request (SPEC.md, "VERSION").
func (p Plugin) versionJSON(stdin []byte) ([]byte, error) {
	var question struct {
		CNIVersion string `json:"cniVersion"`
	}
	answer := struct {
		CNIVersion        string   `json:"cniVersion"`
		SupportedVersions []string `json:"supportedVersions"`
	}{version.Current(), p.versions().SupportedVersions()}
	if json.Unmarshal(stdin, &question) == nil && question.CNIVersion != "" && len(question.CNIVersion) < 32 {
		answer.CNIVersion = question.CNIVersion
	}
	out, err := json.Marshal(answer)
	return append(out, '\n'), err
}

// errorJSON encodes an error as an error document (SPEC.md, "Error"). It has all that an administrator needs, because runtimes show msg and
// details but drop stderr.
func (r *Request) errorJSON(err error) []byte {
	text := strings.NewReplacer("\n", "; ").Replace(err.Error()) // errors.Join puts each error on a line
	msg := fmt.Sprintf("%s %s: %s", r.Plugin, Plain(strings.ToLower(r.Verb), 20), Plain(text, 900))
	details := r.identity()
	if h := Hint(err); h != "" {
		details += "; " + Plain(h, 900)
	}
	if r.Verb == "DEL" {
		msg, details = notReadAsSuccess(msg), notReadAsSuccess(details)
	}
	out, _ := json.MarshalIndent(struct {
		CNIVersion string `json:"cniVersion"`
		Code       uint   `json:"code"`
		Msg        string `json:"msg"`
		Details    string `json:"details,omitempty"`
	}{r.CNIVersion, Code(err), msg, details}, "", "    ")
	return append(out, '\n')
}

// notReadAsSuccess replaces phrases such as "not found" in an error of DEL, because go-cni ignores errors with such phrases (cni.go,
// Remove).
func notReadAsSuccess(msg string) string {
	return strings.NewReplacer("not found", "is missing", "no such file or directory", "file is missing", "no such file",
		"missing file").Replace(msg)
}

func (r *Request) identity() string {
	var parts []string
	for _, f := range [][2]string{{"pod", r.Pod.String()}, {"container", r.ContainerID}, {"ifname", r.IfName},
		{"netns", r.NetnsPath}, {"network", r.Network}} {
		if f[1] != "" {
			parts = append(parts, f[0]+"="+Plain(f[1], 300))
		}
	}
	return strings.Join(parts, " ")
}

func join(versions []string) string { return strings.Join(versions, ", ") }
